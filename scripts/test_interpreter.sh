#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: test_interpreter.sh VERSION [PYTEST_ARGUMENT...]
# Builds the extension for another CPython that this machine has, such as 3.12, or 3.13t, and runs
# the tests that need NumPy alone with it: in an environment without torch, and with the
# oldest NumPy that the package claims for the oldest Python. The core library does not
# depend on Python: from the release build ccache has all but the bindings, which are not
# optimised. Between the oldest and the newest Python that are claimed few tests run: they find
# what the oldest and the newest both have. Does nothing where there is no such interpreter.
set -eu
version=$1
shift
folder=build/python$version

interpreter=$(PYTHONPATH=tests_py python -c '
import sys
from audit import machine
print(machine.interpreter(sys.argv[1]) or "")' "$version")
if [ -z "$interpreter" ]; then
  echo "No CPython $version with headers here."
  exit
fi
"$interpreter" -m venv "$folder/venv"

test_requirement() { python scripts/requirements.py test | grep -E "^$1[<>=]"; }
numpy=numpy
if [ "$version" = 3.10 ]; then
  numpy=$(python scripts/requirements.py | sed -n 's/^numpy>=/numpy==/p')
fi
"$folder/venv/bin/pip" install -q --disable-pip-version-check --prefer-binary "$numpy" \
  "$(test_requirement pytest)" "$(test_requirement pytest-timeout)" \
  "$(test_requirement hypothesis)" "$(test_requirement ml_dtypes)" \
  "tomli; python_version < '3.11'"

# The headers that the release build has found, which are of no version of Python.
eigen=$(sed -n 's/^Eigen3_DIR:[A-Z]*=//p' build/release/CMakeCache.txt)
cmake -S . -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCPATTN_WERROR=ON \
  -DCPATTN_TESTS=OFF -DCPATTN_C_LIBRARY=OFF -DCPATTN_BINDINGS_OPTIONS=-O0 \
  -DPython_EXECUTABLE="$PWD/$folder/venv/bin/python" \
  -Dpybind11_DIR="$(python -m pybind11 --cmakedir)" -DEigen3_DIR="$eigen" >/dev/null
cmake --build "$folder"

files=
names="audit_machine context_parallel index_tensors kv_layout transfer_copies"
case $version in 3.10 | 3.13 | 3.13t)
  names="$names context_parallel_gates dsa_metadata halo huge_caches kv_pages kv_wire plan_kv_links
    plan_kv_transfer send_state_entries shard_pools shared_objects transfer_engine transfer_types" ;;
esac
for name in $names; do
  found=$(find tests_py -name "test_$name.py")
  files="$files ${found:?There is no test_$name.py}"
done
"$folder/venv/bin/python" -c '
import platform, numpy
print(f"Tests with CPython {platform.python_version()} and NumPy {numpy.__version__}:", flush=True)'
# shellcheck disable=SC2086
PYTHONPATH=$folder/python exec "$folder/venv/bin/python" -m pytest -q -m "not slow" \
  --hypothesis-profile=quick "$@" $files
