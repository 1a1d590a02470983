# SPDX-License-Identifier: Apache-2.0
"""cpattn as the CPU attention of vLLM, by a plug-in of the group ``vllm.general_plugins``.

If cpattn is installed, vLLM finds `register` itself, in every process it starts. To turn it off,
set ``CPATTN_PLUGINS=0``, or list other plug-ins in ``VLLM_PLUGINS``.
"""

from __future__ import annotations

from .plugin import register

__all__ = ["register"]
