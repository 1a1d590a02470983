# SPDX-License-Identifier: Apache-2.0
"""Single files of released sglang, run without installation: from wheels that `pip download
--no-deps --only-binary :all: --python-version 3.11` puts into the folder CPATTN_SGLANG_WHEELS."""

import contextlib
import importlib
import sys
import warnings
import zipfile
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from audit.machine import wheel_of_sglang
from audit.records import note
from cpattn.integrations import torch_npu
from support.stand_ins import Absent, DevicesAreTheCpu, PackageFinder, stand_ins_for_what_lacks


@contextlib.contextmanager
def release(version: str, **names: str) -> Iterator[SimpleNamespace]:
    """Yield the modules sglang.srt.<name> of a release under their keys, within the context.

    Other modules of sglang are stand-ins, torch_npu is this library's, and all devices are the CPU.
    """
    names = {key: f"sglang.srt.{name}" for key, name in names.items()}
    wheel = _wheel(version)
    note("engine", "sglang, files of a release", version)
    # Metrics are registered once per process: metrics of another release must stay out.
    finders = [
        PackageFinder("sglang", wheel, names.values()),
        PackageFinder("prometheus_client", wheel, []),
    ]
    others = _take_away()
    sys.meta_path[:0] = finders
    try:
        with torch_npu.install(), stand_ins_for_what_lacks(), DevicesAreTheCpu():
            # Imports must compile nothing, for which torch would need a real triton.
            with warnings.catch_warnings(), mock.patch.object(torch, "compile", Absent):
                warnings.simplefilter("ignore")
                modules = {key: importlib.import_module(name) for key, name in names.items()}
            for module in modules.values():  # they import it only if there is an NPU
                vars(module).setdefault("torch_npu", sys.modules["torch_npu"])
            yield SimpleNamespace(**modules)
    finally:
        for finder in finders:
            sys.meta_path.remove(finder)
        _take_away()
        sys.modules.update(others)


def _wheel(version: str) -> zipfile.Path:
    wheel = wheel_of_sglang(version)
    if wheel is None:
        pytest.skip(f"CPATTN_SGLANG_WHEELS names no folder with the wheel of sglang {version}")
    return zipfile.Path(wheel)


def _take_away() -> dict[str, object]:
    packages = ("sglang", "prometheus_client")
    names = [name for name in sys.modules if name.split(".")[0] in packages]
    return {name: sys.modules.pop(name) for name in names}
