# SPDX-License-Identifier: Apache-2.0
"""cpattn as the CPU attention of vLLM, a plug-in of its group ``vllm.general_plugins``.

Where cpattn is installed, vLLM finds `register` by itself, in every process it starts. To leave it
out, set ``CPATTN_PLUGINS=0``, or name the wanted plug-ins in ``VLLM_PLUGINS``.
"""

from __future__ import annotations

import os

BACKEND = "cpattn.integrations.vllm.backend.CpattnBackend"


def register() -> None:
    """Put `backend.CpattnBackend` behind the name CPU_ATTN, for engines built from now on.

    Does nothing where ``CPATTN_PLUGINS`` is 0, and the same however often it is called.
    """
    if os.environ.get("CPATTN_PLUGINS") == "0":
        return
    from vllm.v1.attention.backends import registry  # type: ignore[import-not-found]

    registry.register_backend(registry.AttentionBackendEnum.CPU_ATTN, BACKEND)
