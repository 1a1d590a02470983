# SPDX-License-Identifier: Apache-2.0
"""cpattn in sglang 0.5.23: a plug-in in its group ``sglang.srt.plugins``.

    pip install .                               # on, in every process of the engine
    CPATTN_PLUGINS=0 sglang serve ...           # off

cpattn then makes sglang's plans, and ``--attention-backend cpattn`` computes attention on a CPU.

Without the entry point, call it before the engine starts:

    from cpattn.integrations import sglang
    sglang.install()

``metadata``  context-parallel metadata as sglang's own objects
``planners``  the top-k choice and the planners of KV transfer
``shards``    the plans of pools whose pages are striped over ranks
``attention`` the attention backend
``cp_cpu``    the stream that prefill in context parallel asks CUDA for, on a CPU
``cpu_engine``  stand-ins for what sglang imports on a CPU and PyPI has not for one
``plugin``    what is hooked where, and the switch
"""

from .metadata import build_metadata as build_metadata
from .planners import get_topk_transform_method as get_topk_transform_method
from .planners import group_concurrent_contiguous as group_concurrent_contiguous
from .plugin import install as install
from .plugin import uninstall as uninstall

__all__ = [
    "build_metadata",
    "get_topk_transform_method",
    "group_concurrent_contiguous",
    "install",
    "uninstall",
]
