#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: system_packages.sh PYTHON [PACKAGE...]
# Installs by apt what the build needs and does not find (a C++20 compiler,
# Python with venv and headers, GoogleTest), the named packages, and what the
# transfer engine Mooncake loads. Without root or passwordless sudo it prints the
# command to run instead, and fails if the build needs it: tests can skip the engine.
set -eu
python=$1
shift

missing=
need() { missing="$missing $*"; }

compiles() { echo "$1" | ${CXX:-c++} -std=c++20 -x c++ -fsyntax-only - 2>/dev/null; }
if ! command -v "${CXX:-c++}" >/dev/null; then
  need g++ libc6-dev
elif ! compiles '#include <memory>
static_assert(__cpp_lib_smart_ptr_for_overwrite);'; then
  echo "cpattn needs GCC >= 12 or clang >= 14. On Ubuntu 22.04: sudo apt-get install g++-12," \
    "then make CXX=g++-12 ..." >&2
  exit 1
fi
compiles '#include <gtest/gtest.h>' || need libgtest-dev

if ! command -v "$python" >/dev/null; then
  need python3 python3-venv python3-dev
else
  version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
  if "$python" -c 'import sys; sys.exit(sys.version_info >= (3, 10))'; then
    echo "cpattn needs Python >= 3.10 and $python is $version: make PYTHON=<a newer one> ..." >&2
    exit 1
  fi
  "$python" -c 'import ensurepip, venv' 2>/dev/null || need "$version-venv"
  "$python" -c 'import sysconfig as s; open(s.get_path("include") + "/Python.h")' 2>/dev/null ||
    need "$version-dev"
fi

for package; do
  dpkg -s "$package" >/dev/null 2>&1 || need "$package"
done

optional=
want() {  # want LIBRARY PACKAGE
  "$python" -c "import ctypes; ctypes.CDLL('$1')" 2>/dev/null || optional="$optional $2"
}
if [ "$(uname -m)" = x86_64 ]; then
  want libibverbs.so.1 libibverbs1
  want libnuma.so.1 libnuma1
  want libcurl.so.4 libcurl4
fi
[ -n "$missing$optional" ] || exit 0

go_on() {
  echo "Going on: tests of Mooncake's transfer engine will be skipped." >&2
  exit 0
}
advice=
if ! command -v apt-get >/dev/null; then
  advice="not found (names as in Debian):$missing$optional"
elif [ "$(id -u)" = 0 ]; then
  as_root=
elif sudo -n true 2>/dev/null; then
  as_root=sudo
else
  advice="please run  sudo apt-get install$missing$optional"
fi
if [ -n "$advice" ]; then
  echo "cpattn: $advice" >&2
  if [ -n "$missing" ]; then
    echo "Then run make again." >&2
    exit 1
  fi
  go_on
fi

install() {
  $as_root env DEBIAN_FRONTEND=noninteractive \
    apt-get install -qqy --no-install-recommends "$@" >/dev/null
}
echo "Installing by apt:$missing$optional ..."
$as_root apt-get update -qq || [ -z "$missing" ]
[ -z "$missing" ] || install $missing
[ -z "$optional" ] || install $optional || go_on
