#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: aarch64_python.sh FOLDER
# Unpacks Python for aarch64 from this Debian or Ubuntu into FOLDER, with what it needs to
# run under qemu-user; FOLDER/include has its headers. Nothing is installed, and what apt
# knows of this machine stays as it is: it has lists of its own for this, in FOLDER/apt.
set -eu
folder=$1
test ! -e "$folder/.ready" || exit 0
rm -rf "$folder"
mkdir -p "$folder/apt/state/lists/partial" "$folder/apt/cache/archives/partial" "$folder/debs"
folder=$(cd "$folder" && pwd)
: >"$folder/apt/status"
chmod -R a+rX "$folder/apt"

apt() {
  command=$1
  shift
  "$command" -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 \
    -o Dir::State="$folder/apt/state" -o Dir::State::status="$folder/apt/status" \
    -o Dir::Cache="$folder/apt/cache" -o APT::Sandbox::User=root \
    -o Acquire::Languages=none -o APT::Update::Post-Invoke::= "$@"
}
apt apt-get update
version=$(apt apt-cache depends python3-minimal |
  sed -n 's/.*Depends: \(python3\.[0-9]*\)-minimal$/\1/p' | head -1)
cd "$folder/debs"
apt apt-get download "$version-minimal" "lib$version-minimal" "lib$version-stdlib" "lib$version-dev" \
  libc6 libexpat1 zlib1g libffi8 libssl3 libbz2-1.0 liblzma5 libgcc-s1 libstdc++6
for package in *.deb; do
  dpkg-deb -x "$package" "$folder"
done
rm -rf "$folder/apt" "$folder/debs"

# One folder of headers: the one that all processors share asks for this in another.
cp -r "$folder/usr/include/$version" "$folder/include"
cp "$folder/usr/include/aarch64-linux-gnu/$version/pyconfig.h" "$folder/include/pyconfig.h"
touch "$folder/.ready"
