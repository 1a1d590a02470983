# SPDX-License-Identifier: Apache-2.0
"""Attention on every instruction set against the oracle.

The test runs in its own process, so that an illegal instruction ends only that process. This
module, run by Python, prints a line of JSON for each instruction set, the one in use first.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import _core, reference
from ..attention import paged_attention
from .finding import Finding
from .roundings import error_in_units

_SECTION = "self-test"
_SECONDS = 60
_PAGE = 16


def findings(command: list[str] | None = None) -> Iterator[Finding]:
    """Report the error of attention on each instruction set, or how the process ended."""
    command = command or [sys.executable, "-m", __name__]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        yield Finding(_SECTION, "attention", f"not done after {_SECONDS} s", "broken")
        return
    answers = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    for answer in answers:
        right = answer["error"] <= 1  # False also for NaN
        text = f"float32, largest error {answer['error']:.2f} of what roundings explain"
        state = "ok" if right else "broken"
        hint = "" if right else "export CPATTN_ISA=portable, and please report it"
        yield Finding(_SECTION, answer["isa"], text, state, hint)  # type: ignore[arg-type]
    if run.returncode:
        what = [name for name in _order() if name not in [a["isa"] for a in answers]]
        name = what[0] if what else "attention"
        yield Finding(_SECTION, name, _end(run.returncode, run.stderr), "broken")


def _end(code: int, stderr: str) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = stderr.strip().splitlines()
    return lines[-1] if lines else f"ended with exit code {code}"


def _order() -> list[str]:
    """Return the instruction set in use, then the others."""
    try:
        active = _core.active_isa()
    except ValueError:
        return ["attention"]
    return [active, *(name for name in _core.supported_isas() if name != active)]


def error_of_attention() -> float:
    """Return the error of a small ragged batch with prefixes, in units of expected rounding."""
    rng = np.random.default_rng(1)
    q_lens, kv_lens = [37, 1, 5], [37, 90, 21]
    pages = [-(-n // _PAGE) for n in kv_lens]
    tables = np.full((len(pages), max(pages)), -1, np.int32)
    tables[np.arange(max(pages)) < np.array(pages)[:, None]] = rng.permutation(sum(pages))
    q = rng.standard_normal((sum(q_lens), 8, 64), dtype=np.float32)
    k, v = rng.standard_normal((2, sum(pages), _PAGE, 2, 64), dtype=np.float32)
    batch: dict[str, Any] = {
        "q_lens": q_lens,
        "kv_lens": kv_lens,
        "block_tables": tables,
        "page_size": _PAGE,
    }
    out = paged_attention(q, k, v, **batch)
    expected, _ = reference.paged_attention(q, k, v, **batch)
    magnitude, _ = reference.paged_attention(q, k, np.abs(v), **batch)
    return error_in_units(out, expected, magnitude, "float32")


def main() -> None:
    """Print a line for each instruction set."""
    for name in _order():
        _core.set_isa(name)
        print(json.dumps({"isa": name, "error": error_of_attention()}), flush=True)


if __name__ == "__main__":
    main()
