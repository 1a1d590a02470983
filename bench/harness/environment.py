# SPDX-License-Identifier: Apache-2.0
"""The environment of a figure, and the place where figures are kept."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cpattn
from bench.harness.worker import ROOT
from cpattn import _core
from cpattn.doctor.cpu_name import cpu_name

RESULTS = ROOT / "bench" / "results"
#: Benchmarks whose results with and without AMX are kept: AMX has another peak and other bars.
ON_BOTH = ("attention", "exchanges", "extends", "kv_dtypes")


def environment() -> dict[str, Any]:
    """The environment of a figure: machine, instruction set, compiler, versions, commit."""
    return {
        "machine": cpu_name(),
        "isa": cpattn.active_isa(),
        "num_threads": _core.default_num_threads(),
        "compiler": _core.__compiler__,
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "torch": version("torch"),
        "onednn_max_cpu_isa": os.environ.get("ONEDNN_MAX_CPU_ISA"),
        "cpattn": cpattn.__version__,
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def results_file(bench: str, about: dict[str, Any]) -> Path:
    """The file that keeps results of a benchmark, in the environment `about`."""
    amx = "-amx" if bench in ON_BOTH and about["isa"] == "amx" else ""
    return RESULTS / f"{bench}{amx}.jsonl"


def _commit() -> str | None:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
