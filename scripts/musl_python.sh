#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: musl_python.sh VERSION x86_64 FOLDER | musl_python.sh VERSION aarch64 FOLDER PYTHON
# Compiles CPython VERSION, such as 3.13, with musl for a processor into FOLDER: from the sources of
# Debian 13, by the clang of zig (ZIG), with the C library of its package musl, which lies in FOLDER,
# too. For aarch64, PYTHON is what this has compiled for x86-64: that of another release cannot run
# the library of this one. Nothing is installed, and what apt knows of this machine stays as it is.
# The Python has zlib and ctypes, and neither pip nor ssl.
set -eu
version=$1 architecture=$2 folder=$3 python=${4-}
case $architecture in aarch64) processor=arm64 ;; *) processor=amd64 ;; esac
test ! -e "$folder/.ready" || exit 0
rm -rf "$folder"
mkdir -p "$folder/apt/state/lists/partial" "$folder/apt/cache/archives/partial" \
  "$folder/apt/sources" "$folder/work"
folder=$(cd "$folder" && pwd)

# Debian 12 has musl 1.2.3, which cannot load NumPy: its wheels have relocations that 1.2.4 knows.
# The archive of libffi in Debian 13 would have to be configured by autoconf first.
: >"$folder/apt/status"
debian='[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian'
printf '%s\n' "deb $debian trixie main" "deb-src $debian trixie main" "deb-src $debian bookworm main" \
  >"$folder/apt/sources/debian.list"
chmod -R a+rX "$folder/apt"
apt() {
  command=$1
  shift
  "$command" -qq -o APT::Architecture=$processor -o APT::Architectures=$processor \
    -o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts="$folder/apt/sources" \
    -o Dir::State="$folder/apt/state" -o Dir::State::status="$folder/apt/status" \
    -o Dir::Cache="$folder/apt/cache" -o APT::Sandbox::User=root \
    -o Acquire::Languages=none -o APT::Update::Post-Invoke::= "$@"
}
apt apt-get update
cd "$folder/work"
apt apt-get source --download-only --tar-only "python$version" zlib libffi/bookworm
apt apt-get download musl
dpkg-deb -x musl_*.deb "$folder"
for archive in *.orig.tar.gz *.orig.tar.xz *.orig.tar.bz2; do
  test ! -e "$archive" || tar -xf "$archive"
done

target=$architecture-linux-musl
# Without -O2, also where it links, zig adds its sanitizer.
export CC="$ZIG cc -target $target -dynamic -O2" AR="$ZIG ar" RANLIB="$ZIG ranlib"
export CFLAGS="-g0 -fPIC -Wno-date-time"
(
  cd zlib-*
  CHOST=$target ./configure --static --prefix="$folder/work"
  make libz.a
  mkdir -p ../lib ../include
  cp libz.a ../lib
  cp zlib.h zconf.h ../include
)
(
  cd libffi-*
  # musl has no function for files that may be executed, by which it would write trampolines.
  ./configure --build=x86_64-build-linux-gnu --host="$target" --disable-shared --disable-docs \
    --disable-exec-static-tramp --disable-multi-os-directory --prefix="$folder/work" \
    lt_cv_prog_compiler_static_works=no
  make install
)
cd Python-*
# CPython knows musl by what its stdarg.h defines, in whose place zig takes that of clang. Threads
# have the stack that Alpine's Python gives them, as that of musl is for little more than C.
./configure --build=x86_64-linux-musl --host="$target" ${python:+"--with-build-python=$python"} \
  --prefix="$folder" --without-ensurepip --disable-test-modules \
  CPP="$CC -E -D__DEFINED_va_list" CPPFLAGS="-I$folder/work/include -DTHREAD_STACK_SIZE=0x100000" \
  LDFLAGS="-L$folder/work/lib -Wl,--dynamic-linker=$folder/usr/lib/ld-musl-$architecture.so.1" \
  OPT=-DNDEBUG PKG_CONFIG=false ac_cv_buggy_getaddrinfo=no \
  ac_cv_file__dev_ptmx=yes ac_cv_file__dev_ptc=no
make -j "$(nproc)"
make install
rm -rf "$folder/apt" "$folder/work"
touch "$folder/.ready"
