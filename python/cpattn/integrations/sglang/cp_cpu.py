# SPDX-License-Identifier: Apache-2.0
"""Prefill in context parallel on a CPU: the stream that sglang's runner asks CUDA for.

`EagerRunner._execute_extend_cp` of sglang 0.5.23 asks for the current CUDA stream on any device,
which raises AssertionError in a torch without CUDA, and passes it to strategies that ignore it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

_logger = logging.getLogger(__name__)
_lock = threading.Lock()
_replaced: list[Any] = []  # by each call in progress, on any thread: torch's own function first


def execute_extend_cp(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Run sglang's function; on a CPU, the current stream is the CPU's until all calls return."""
    import torch

    if str(runner.model_runner.device) != "cpu":
        return original(runner, *args, **kwargs)
    _tell()
    with _lock:
        _replaced.append(torch.cuda.current_stream)
        torch.cuda.current_stream = torch.cpu.current_stream  # type: ignore[assignment]
    try:
        return original(runner, *args, **kwargs)
    finally:
        with _lock:
            torch.cuda.current_stream = _replaced.pop()


@cache
def _tell() -> None:
    """Say once in each process that prompts are split there."""
    _logger.info("cpattn has sglang prefill in context parallel on this CPU (part cp_cpu)")
