# SPDX-License-Identifier: Apache-2.0
"""cpattn as the CPU attention of vLLM, a plug-in of its group ``vllm.general_plugins``.

Where cpattn is installed, vLLM finds `register` by itself, in every process it starts. To leave it
out, set ``CPATTN_PLUGINS=0``, or name the wanted plug-ins in ``VLLM_PLUGINS``.
"""

from __future__ import annotations

from .plugin import register

__all__ = ["register"]
