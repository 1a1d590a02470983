# SPDX-License-Identifier: Apache-2.0
"""Tools that refute or prove context-parallel code, of any project and for any device.

``invariants``   the rules, each with an id that messages, documents and JSON use
``findings``     a broken rule with its place and advice; the report of a tool
``requirements`` `require`: invariants that a tool must decide
``linting``      `lint`: refutes or proves the plans of all ranks, from integers alone
``simulation``   `simulate`: all ranks of a program in one process; needs torch
``results``      `expect`: compares results of all ranks with float64
``conformance``  `conform`: tries an operator on many batches; ``pytest``: as a test
``captures``     reads files of `cpattn.captures`: batches, and plans remade for other ranks
``zoo``          small rebuilds of bugs of engines and libraries, which the tools refute
``page``         reports as a page of HTML; needs jinja2

Importing this package needs only NumPy; tools load on first use.
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

#: Tools, each with its module.
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
    except AttributeError as error:  # `from cpattn_proof import ...` would take it for a typo
        raise ImportError(f"cpattn_proof.{name} cannot be imported: {error}") from error
    return getattr(tool, name)
