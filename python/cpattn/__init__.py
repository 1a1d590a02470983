# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention for LLM serving on CPU: plans, paged kernels and oracles.

    plan = cpattn.build_cp_metadata(extend_lens, seq_lens, cp_rank=0, cp_size=2)
    out = cpattn.paged_attention(q, k_cache, v_cache, q_lens=[64], kv_lens=[64], ...)

The top level has the most used names. Sub-packages load on first use:
``context_parallel`` (rules of engines), ``sparse`` (DSA), ``npu`` (operators of Ascend),
``kv`` (pools), ``transfer`` (plans of KV transfer), ``scheduling`` (prefix cache and batches),
``profiling``, ``captures`` (records of a running engine), ``distributed`` (torch), ``integrations``
(engines and libraries) and ``torch_guard``. The package imports only NumPy. Tools are in packages
of their own: ``cpattn_proof`` checks code of others, ``cpattn_lab`` predicts and replays.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from . import _values as _values
from . import reference
from ._core import AttentionPlan, __version__, active_isa, set_num_threads, supported_isas
from ._threads import num_threads
from .attention import paged_attention, plan_attention, run_attention
from .context_parallel import (
    ContextParallelMetadata,
    ForwardMode,
    attend_rank,
    build_cp_metadata,
    build_cp_metadata_all_ranks,
    can_apply_cp,
    do_cp_attn_fia,
)
from .merge import merge_state, merge_states
from .profiling import Profile, profile
from .sparse import TopkTransformMethod, get_topk_transform_method

if TYPE_CHECKING:
    from . import captures as captures
    from . import context_parallel as context_parallel
    from . import distributed as distributed
    from . import integrations as integrations
    from . import kv as kv
    from . import npu as npu
    from . import profiling as profiling
    from . import scheduling as scheduling
    from . import sparse as sparse
    from . import torch_guard as torch_guard
    from . import transfer as transfer

__all__ = [
    "AttentionPlan",
    "ContextParallelMetadata",
    "ForwardMode",
    "Profile",
    "TopkTransformMethod",
    "__version__",
    "active_isa",
    "attend_rank",
    "build_cp_metadata",
    "build_cp_metadata_all_ranks",
    "can_apply_cp",
    "do_cp_attn_fia",
    "get_topk_transform_method",
    "merge_state",
    "merge_states",
    "num_threads",
    "paged_attention",
    "plan_attention",
    "profile",
    "reference",
    "run_attention",
    "set_num_threads",
    "supported_isas",
]

_SUB_PACKAGES = (
    "captures", "context_parallel", "distributed", "integrations", "kv", "npu", "profiling",
    "scheduling", "sparse", "torch_guard", "transfer",
)  # fmt: skip


def __getattr__(name: str) -> ModuleType:
    """Import a sub-package on first use: every import takes time, and `distributed` needs torch."""
    if name in _SUB_PACKAGES:
        try:
            return import_module(f".{name}", __name__)
        except AttributeError as error:  # `from cpattn import ...` would take it for a typo
            raise ImportError(f"cpattn.{name} cannot be imported: {error}") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *_SUB_PACKAGES]
