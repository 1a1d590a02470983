# SPDX-License-Identifier: Apache-2.0
"""Check whether installed engines can be imported, which their metadata do not tell."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping

from ..integrations import _support
from ..integrations._support import first_installed
from .finding import Finding

_SECTION = "imports, each in a process of its own"
_SECONDS = 180
# Importing a package often loads nothing yet; these statements load the engine.
_STATEMENTS = {
    "torch": "import torch",
    "sglang": "import sglang.srt.server_args",
    "vLLM on CPU": "from vllm import LLM",
    "transformers": "from transformers import LlamaForCausalLM",
}


def findings(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Return a line for each installed engine."""
    for name, statement in _STATEMENTS.items():
        if first_installed(_support.find(name).distributions) is not None:
            yield _imported(name, statement, environ)


def _imported(name: str, statement: str, environ: Mapping[str, str]) -> Finding:
    command = [sys.executable, "-c", statement]
    environment = {key: value for key, value in environ.items() if key != "CPATTN_CAPTURE"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace",
            timeout=_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        text = f"`{statement}` has not ended after {_SECONDS} s"
        return Finding(_SECTION, name, text, "warning")
    if done.returncode == 0:
        return Finding(_SECTION, name, f"`{statement}` works")
    last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
    why = last[0].strip()[:300] if last else f"exit code {done.returncode}"
    hint = f'python -c "{statement}" shows all of it'
    return Finding(_SECTION, name, f"`{statement}` fails: {why}", "broken", hint)
