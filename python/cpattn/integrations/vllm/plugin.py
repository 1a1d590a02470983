# SPDX-License-Identifier: Apache-2.0
"""The hook of vLLM: puts the backends of this package behind the names of vLLM's own.

For decode context parallelism it also gives vLLM on a CPU the slots of new tokens, which vLLM's own
function there has for one rank alone; the worker takes it after the plug-ins have been loaded.
"""

from __future__ import annotations

import logging
import os

from ...captures.recorder import capture_by_environment
from ...profiling.calls import announced
from .._support import find, first_installed

BACKENDS = {
    "CPU_ATTN": "cpattn.integrations.vllm.backend.CpattnBackend",
    "CPU_MLA": "cpattn.integrations.vllm.mla.CpattnMLABackend",
}

_RELEASES = find("vLLM on CPU")
#: The variable that has releases taken over which were not tried.
UNTRIED = _RELEASES.untried
# vLLM shows what is logged below its own name.
_logger = logging.getLogger("vllm.cpattn")


def register() -> None:
    """Put cpattn's backends behind the names CPU_ATTN and CPU_MLA, for engines built from now on.

    Does nothing where ``CPATTN_PLUGINS`` is 0, and the same however often it is called. A release
    of vLLM that the backend was not tried with keeps its own attention, as its KV cache may have
    another layout, and one line in the log tells of it; with ``CPATTN_VLLM_UNTRIED=1`` a later one
    than 0.32 is taken over all the same, and the line says that.

    Examples
    --------
    >>> register()  # doctest: +SKIP
    """
    if os.environ.get("CPATTN_PLUGINS") == "0":
        return
    found = first_installed(_RELEASES.distributions)
    release = found[1] if found else "of an unknown release"  # no number: refused
    if not _is_taken_over(release):
        return
    capture_by_environment()
    if os.environ.get("CPATTN_CAPTURE"):
        announce_layouts()
    from vllm.utils import cpu_triton_utils  # type: ignore[import-not-found]
    from vllm.v1.attention.backends import registry  # type: ignore[import-not-found]

    from .slots import compute_slot_mapping

    cpu_triton_utils._compute_slot_mapping_kernel_impl = compute_slot_mapping

    for name, backend in BACKENDS.items():
        registry.register_backend(registry.AttentionBackendEnum[name], backend)


def _is_taken_over(release: str) -> bool:
    """Tell whether attention of this release is computed here, and say so of one not tried."""
    verdict, tried = _RELEASES.verdict(release), " and ".join(_RELEASES.tried)
    if verdict == "tried":
        return True
    if _RELEASES.is_taken_over(release, os.environ):
        _logger.warning(
            "cpattn computes attention of vLLM %s, with which it was not tried, by %s=1: it was "
            "with %s",
            release,
            UNTRIED,
            tried,
        )
        return True
    hint = f"; {UNTRIED}=1 turns it on" if verdict == "not tried" else ""
    _logger.warning(
        "cpattn leaves attention to vLLM %s: its plug-in was tried with %s%s", release, tried, hint
    )
    return False


def announce_layouts() -> None:
    """Have captures hear how the GPU worker of vLLM shares out batches over ranks of PCP, DCP."""
    from vllm.v1.worker.gpu.block_table import BlockTables  # type: ignore[import-not-found]
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner  # type: ignore[import-not-found]
    from vllm.v1.worker.gpu.pcp_manager import PCPManager  # type: ignore[import-not-found]

    for owner, name in (
        (PCPManager, "_build_batch_layout"),
        (BlockTables, "__init__"),
        (BlockTables, "append_block_ids"),
        (GPUModelRunner, "prepare_attn"),
    ):
        function = getattr(owner, name)
        if not hasattr(function, "__wrapped__"):
            setattr(owner, name, announced(f"{owner.__name__}.{name}")(function))
