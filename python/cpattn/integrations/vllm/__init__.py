# SPDX-License-Identifier: Apache-2.0
"""cpattn as the CPU attention of vLLM, a plug-in of its group ``vllm.general_plugins``.

Where cpattn is installed, vLLM finds `register` by itself, in every process it starts. To leave it
out, set ``CPATTN_PLUGINS=0``, or name the wanted plug-ins in ``VLLM_PLUGINS``.
"""

from __future__ import annotations

import os

BACKEND = "cpattn.integrations.vllm.backend.CpattnBackend"
SPINS = "30000"  # some tenths of a millisecond, longer than from one operator of torch to the next


def register() -> None:
    """Put `backend.CpattnBackend` behind the name CPU_ATTN, for engines built from now on.

    Sets ``GOMP_SPINCOUNT`` for the processes that vLLM starts, unless it or ``OMP_WAIT_POLICY`` is
    set: threads of GNU's OpenMP that have no work spin for milliseconds, on the CPUs that cpattn's
    then have to share. Does nothing where ``CPATTN_PLUGINS`` is 0, and the same however often it is
    called.
    """
    if os.environ.get("CPATTN_PLUGINS") == "0":
        return
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    from vllm.v1.attention.backends import registry  # type: ignore[import-not-found]

    registry.register_backend(registry.AttentionBackendEnum.CPU_ATTN, BACKEND)
