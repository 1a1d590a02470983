#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: system_packages.sh [--install] demo|test PYTHON [PACKAGE...]
# Looks for what make needs of the system: a C++20 compiler, Python with venv and headers;
# for the tests GoogleTest, what the transfer engine Mooncake loads, and the named packages.
# What is missing is printed as one line for apt, and is an error if the build needs it.
# With --install, and where it is root already, it runs that line.
set -eu
install=
if [ "$1" = --install ]; then
  install=yes
  shift
fi
for_what=$1 python=$2
shift 2

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
[ "$for_what" = demo ] || compiles '#include <gtest/gtest.h>' || need libgtest-dev

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
if [ "$for_what" = test ] && [ "$(uname -m)" = x86_64 ]; then
  want libibverbs.so.1 libibverbs1
  want libnuma.so.1 libnuma1
  want libcurl.so.4 libcurl4
fi
[ -n "$missing$optional" ] || exit 0

if ! command -v apt-get >/dev/null; then
  echo "cpattn needs (names as in Debian):$missing$optional" >&2
  [ -z "$missing" ] || exit 1
  exit 0
fi

as_root=
[ "$(id -u)" = 0 ] || as_root=sudo
apt="apt-get install -y --no-install-recommends"
if [ -n "$as_root" ] && [ -z "$install" ]; then
  if [ -n "$missing" ]; then
    echo "cpattn needs packages of the system. \`make system\` installs them, or you do:" >&2
    echo "  sudo $apt$missing$optional" >&2
    exit 1
  fi
  echo "Going on without Mooncake's transfer engine, which would need:" >&2
  echo "  sudo $apt$optional" >&2
  exit 0
fi

packages() {
  $as_root env DEBIAN_FRONTEND=noninteractive $apt -qq "$@" >/dev/null
}
echo "Installing as root: $apt$missing$optional"
$as_root apt-get update -qq || [ -z "$missing" ]
[ -z "$missing" ] || packages $missing
[ -z "$optional" ] || packages $optional ||
  echo "Going on: tests of Mooncake's transfer engine will be skipped." >&2
