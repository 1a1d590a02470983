#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: system_packages.sh PYTHON [PACKAGE...]
# Installs by apt what the build needs and does not find (a C++20 compiler,
# Python with venv and headers, GoogleTest), and the named packages. Without
# root or passwordless sudo it prints the command to run instead.
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
[ -n "$missing" ] || exit 0

if ! command -v apt-get >/dev/null; then
  echo "cpattn: not found (names as in Debian):$missing. Install them and run make again." >&2
  exit 1
elif [ "$(id -u)" = 0 ]; then
  as_root=
elif sudo -n true 2>/dev/null; then
  as_root=sudo
else
  echo "cpattn: please run  sudo apt-get install$missing  and then make again." >&2
  exit 1
fi
echo "Installing by apt:$missing ..."
$as_root apt-get update -qq
$as_root env DEBIAN_FRONTEND=noninteractive \
  apt-get install -qqy --no-install-recommends $missing >/dev/null
