# SPDX-License-Identifier: Apache-2.0
"""Plug-in of vLLM that puts cpattn's attention backends in place of vLLM's own.

For decode context parallelism on a CPU, it also replaces vLLM's slot mapping, which there works for
one rank only. The worker uses the replacement, as it loads plug-ins first.
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
#: The variable that lets cpattn take over releases it was not tried with.
UNTRIED = _RELEASES.untried
# vLLM shows only log records below its own logger.
_logger = logging.getLogger("vllm.cpattn")


def register() -> None:
    """Put cpattn's backends behind the names CPU_ATTN and CPU_MLA, for engines built from now on.

    Repeated calls change nothing; with ``CPATTN_PLUGINS=0`` the call does nothing. A vLLM release
    that cpattn was not tried with may have another KV cache layout, so it keeps its own attention,
    and the log says so. With ``CPATTN_VLLM_UNTRIED=1`` cpattn also takes over releases later than
    0.32, and the log says that.

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
    """Tell whether cpattn computes attention of this release; log it if the release is untried."""
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
    """Announce to captures how vLLM's GPU worker splits batches over ranks of PCP and DCP."""
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
