# SPDX-License-Identifier: Apache-2.0
"""Context-parallel code of anyone, on any device, refuted or proved.

``invariants``   what has to hold, each with an id that messages, documents and JSON use
``findings``     an invariant that does not hold, where, and what to do; the report of a tool
``requirements`` `require`: invariants that a tool has to decide
``linting``      `lint`: refutes or proves what all ranks planned, from integers alone
``simulation``   `simulate`: all ranks of a program in one process; needs torch
``results``      `expect`: results of all ranks, held against float64
``conformance``  `conform`: an operator, tried on many batches; ``pytest``: as a test
``captures``     files of `cpattn.captures`, read again: batches, and plans remade for other ranks
``zoo``          bugs of engines and libraries, rebuilt small, that the tools refute
``page``         reports as a page of HTML; needs jinja2

Importing this needs NumPy alone; tools are imported when they are asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .captures import Capture, read_captures
from .findings import Finding, NotUsable, Report
from .invariants import INVARIANTS, Invariant
from .requirements import require

if TYPE_CHECKING:
    from .conformance.runner import conform as conform
    from .linting.linter import lint as lint
    from .results.expect import expect as expect
    from .simulation.recorded import simulate_capture as simulate_capture
    from .simulation.simulate import simulate as simulate
    from .simulation.simulate import simulate_script as simulate_script

__all__ = [
    "INVARIANTS",
    "Capture",
    "Finding",
    "Invariant",
    "NotUsable",
    "Report",
    "conform",
    "expect",
    "lint",
    "read_captures",
    "require",
    "simulate",
    "simulate_capture",
    "simulate_script",
]

#: Tools, each with the module that has it.
_TOOLS = {
    "conform": ".conformance.runner",
    "expect": ".results.expect",
    "lint": ".linting.linter",
    "simulate": ".simulation",
    "simulate_capture": ".simulation",
    "simulate_script": ".simulation",
}


def __getattr__(name: str) -> Any:
    if name not in _TOOLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        tool = import_module(_TOOLS[name], __name__)
    except AttributeError as error:  # which `from cpattn_proof import ...` would take for a typo
        raise ImportError(f"cpattn_proof.{name} cannot be imported: {error}") from error
    return getattr(tool, name)
