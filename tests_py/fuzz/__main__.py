# SPDX-License-Identifier: Apache-2.0
"""python -m fuzz TARGET [flags and folders of libFuzzer]: fuzzes a target of this folder."""

import importlib
import sys

import atheris


def main() -> None:
    name = sys.argv.pop(1)
    # Atheris must instrument these before other parts of the package import them.
    modules = ["cpattn.transfer", "cpattn_lab.traffic.trace", f"fuzz.{name}"]
    with atheris.instrument_imports(include=modules):
        target = importlib.import_module(f"fuzz.{name}")
    atheris.Setup(sys.argv, target.run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
