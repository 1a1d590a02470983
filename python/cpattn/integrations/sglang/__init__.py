# SPDX-License-Identifier: Apache-2.0
"""The planning of sglang 0.5.23 done by cpattn: a plug-in in its group ``sglang.srt.plugins``.

    pip install .                               # on, in every process of the engine
    CPATTN_PLUGINS=0 sglang serve ...           # off

By hand, before the engine starts, without the entry point:

    from cpattn.integrations import sglang
    sglang.install()

``metadata``  context-parallel metadata as sglang's own objects
``planners``  the top-k choice and the planners of KV transfer
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
