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
# vLLM shows what is logged below its own name.
_logger = logging.getLogger("vllm.cpattn")


def register() -> None:
    """Put cpattn's backends behind the names CPU_ATTN and CPU_MLA, for engines built from now on.

    Does nothing where ``CPATTN_PLUGINS`` is 0, and the same however often it is called. A release
    of vLLM that the backend was not made for keeps its own attention: there the KV cache may have
    another layout, and one line in the log tells of it.

    Examples
    --------
    >>> register()  # doctest: +SKIP
    """
    if os.environ.get("CPATTN_PLUGINS") == "0":
        return
    found = first_installed(_RELEASES.distributions)
    release = found[1] if found else "of an unknown release"  # no number: refused
    if _RELEASES.verdict(release) == "refused":
        _logger.warning(
            "cpattn leaves attention to vLLM %s: its plug-in is for %s, and others before %s",
            release,
            _RELEASES.tried[0],
            _RELEASES.below,
        )
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
