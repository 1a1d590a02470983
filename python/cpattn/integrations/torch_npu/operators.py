# SPDX-License-Identifier: Apache-2.0
"""Registers ``torch.ops.npu`` on import, with torch_npu's schemas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...npu.fia import npu_fused_infer_attention_score
from ...npu.lightning_indexer import npu_lightning_indexer
from ...npu.sparse_flash_attention import npu_sparse_flash_attention
from .._torch_library import Operators

Tensor = torch.Tensor

_NAMES = (
    "npu_fused_infer_attention_score",
    "npu_lightning_indexer",
    "npu_rotary_mul",
    "npu_scatter_nd_update_",
    "npu_sparse_flash_attention",
)

for _name in _NAMES:
    if hasattr(torch.ops.npu, _name):
        raise ImportError(
            f"cpattn.integrations.torch_npu: torch.ops.npu.{_name} is registered already; "
            "it is not replaced"
        )

_operators = Operators("npu")
_kernels = Operators("cpattn_npu")  # parts of operators with other forms


# Dense attention.

_FIA = (
    "(Tensor query, Tensor key, Tensor value, *, Tensor? pse_shift=None, Tensor? atten_mask=None, "
    "SymInt[]? actual_seq_lengths=None, SymInt[]? actual_seq_lengths_kv=None, "
    "Tensor? dequant_scale1=None, Tensor? quant_scale1=None, Tensor? dequant_scale2=None, "
    "Tensor? quant_scale2=None, Tensor? quant_offset2=None, Tensor? antiquant_scale=None, "
    "Tensor? antiquant_offset=None, Tensor? block_table=None, Tensor? query_padding_size=None, "
    "Tensor? kv_padding_size=None, Tensor? key_antiquant_scale=None, "
    "Tensor? key_antiquant_offset=None, Tensor? value_antiquant_scale=None, "
    "Tensor? value_antiquant_offset=None, Tensor? key_shared_prefix=None, "
    "Tensor? value_shared_prefix=None, SymInt[]? actual_shared_prefix_len=None, "
    "Tensor? query_rope=None, Tensor? key_rope=None, Tensor? key_rope_antiquant_scale=None, "
    "int num_heads=1, float scale=1.0, int pre_tokens=2147483647, int next_tokens=2147483647, "
    "str input_layout='BSH', int num_key_value_heads=0, int sparse_mode=0, int inner_precise=0, "
    "int block_size=0, int antiquant_mode=0, bool softmax_lse_flag=False, "
    "int key_antiquant_mode=0, int value_antiquant_mode=0"
)


def _fia_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    num_key_value_heads: int = 0,
    input_layout: str = "BSH",
    softmax_lse_flag: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    axes, _, out_axes = input_layout.partition("_")
    v_head_dim = value.shape[-1]
    if axes == "BSH" or (block_table is not None and value.dim() == 3):
        v_head_dim //= num_key_value_heads or num_heads
    sizes = dict(zip(axes, query.shape, strict=True))
    sizes |= {"N": num_heads, "D": v_head_dim, "H": num_heads * v_head_dim, "1": 1}
    lse_axes = "1" if not softmax_lse_flag else "TN1" if "T" in axes else "BNS1"
    out, lse = ([sizes[axis] for axis in order] for order in (out_axes or axes, lse_axes))
    return query.new_empty(out), query.new_empty(lse, dtype=torch.float32)


def _fia_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    workspace: Tensor | None = None,
    out: Sequence[Tensor],
    **options: Any,
) -> None:
    results = npu_fused_infer_attention_score(query, key, value, **options)
    for written, result in zip(out, results, strict=True):
        if written.shape != result.shape:
            raise ValueError(
                "npu_fused_infer_attention_score.out: out must have the shapes of the results, "
                f"{list(result.shape)}, got {list(written.shape)}"
            )
        written.copy_(result)


_operators.define(
    f"npu_fused_infer_attention_score{_FIA}) -> (Tensor, Tensor)",
    npu_fused_infer_attention_score,
    _fia_fake,
)
_operators.define(
    f"npu_fused_infer_attention_score.out{_FIA}, Tensor? workspace=None, Tensor(a!)[] out) -> ()",
    _fia_out,
    lambda *args, **kwargs: None,
)


def _get_max_workspace(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the workspace that ``.out`` needs: an empty one."""
    return query.new_empty(0)


# Sparse attention.


def _lightning_indexer_fake(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    sparse_count: int = 2048,
    return_value: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    indices = query.new_empty((*query.shape[:-2], 1, sparse_count), dtype=torch.int32)
    return indices, query.new_empty(indices.shape if return_value else (0,))


_operators.define(
    "npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, *, "
    "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, "
    "Tensor? block_table=None, str layout_query='BSND', str layout_key='BSND', "
    "int sparse_count=2048, int sparse_mode=3, int pre_tokens=9223372036854775807, "
    "int next_tokens=9223372036854775807, bool return_value=False) -> (Tensor, Tensor)",
    npu_lightning_indexer,
    _lightning_indexer_fake,
)


def _sparse_flash_attention_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    return_softmax_lse: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = (*query.shape[:-3], 1, *query.shape[-3:-1]) if return_softmax_lse else (0,)
    softmax_max, softmax_sum = (query.new_empty(rows, dtype=torch.float32) for _ in range(2))
    return query.new_empty((*query.shape[:-1], value.shape[-1])), softmax_max, softmax_sum


_operators.define(
    "npu_sparse_flash_attention(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, "
    "float scale_value, *, Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, "
    "Tensor? actual_seq_lengths_kv=None, Tensor? query_rope=None, Tensor? key_rope=None, "
    "int sparse_block_size=1, str layout_query='BSND', str layout_kv='BSND', int sparse_mode=3, "
    "int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, "
    "int attention_mode=0, bool return_softmax_lse=False) -> (Tensor, Tensor, Tensor)",
    npu_sparse_flash_attention,
    _sparse_flash_attention_fake,
)


# Operations on the KV cache and on index keys.


def _write_rows(self: Tensor, indices: Tensor, updates: Tensor) -> None:
    slots = indices[:, 0].numpy()
    ordered = np.sort(slots)
    if len(slots) and not 0 <= ordered[0] <= ordered[-1] < len(self):
        raise ValueError(
            f"npu_scatter_nd_update_: indices must be in [0, {len(self)}), "
            f"got {ordered[0 if ordered[0] < 0 else -1]}"
        )
    if (ordered[1:] == ordered[:-1]).any():  # torch writes in any order: leave each slot one row
        _, last = np.unique(slots[::-1], return_index=True)
        rows = torch.from_numpy(len(slots) - 1 - last)
        indices, updates = indices[rows], updates[rows]
    self.index_put_((indices[:, 0],), updates)


_kernels.define(
    "npu_scatter_nd_update_(Tensor(a!) self, Tensor indices, Tensor updates) -> ()",
    _write_rows,
    lambda self, indices, updates: None,
)


def _scatter_nd_update(self: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"npu_scatter_nd_update_: indices must be int32 or int64, got {indices.dtype}"
        )
    if indices.dim() != 2 or indices.shape[1] != 1:
        raise ValueError(
            "npu_scatter_nd_update_: indices must have shape [n, 1], one row of self each, "
            f"got {list(indices.shape)}"
        )
    if updates.dtype != self.dtype:
        raise ValueError(
            f"npu_scatter_nd_update_: updates must have the dtype of self, {self.dtype}, "
            f"got {updates.dtype}"
        )
    shape = [indices.shape[0], *self.shape[1:]]
    if list(updates.shape) != shape:
        raise ValueError(
            "npu_scatter_nd_update_: updates must have a row of self for each index, "
            f"shape {shape}, got {list(updates.shape)}"
        )
    torch.ops.cpattn_npu.npu_scatter_nd_update_(self, indices, updates)
    return self


# torch does not trace operators that return a tensor they wrote, but traces their parts.
_operators.define_composite(
    "npu_scatter_nd_update_(Tensor(a!) self, Tensor indices, Tensor updates) -> Tensor(a!)",
    _scatter_nd_update,
)


def _reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> None:
    """Write rows [T, H, D] to slots of caches [blocks, block_size, H, D]."""
    for cache, rows in ((key_cache, key), (value_cache, value)):
        slots = cache.view(-1, *cache.shape[2:])  # never a copy, unlike flatten()
        torch.ops.npu.npu_scatter_nd_update_(slots, slot_indices[:, None], rows)


def _rotary_mul(self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    if rotary_mode != "half":
        raise ValueError(f"npu_rotary_mul: rotary_mode must be half, got {rotary_mode!r}")
    x = self.float()
    left, right = x.chunk(2, -1)
    return (x * r1 + torch.cat((-right, left), -1) * r2).to(self.dtype)


_operators.define_composite(
    "npu_rotary_mul(Tensor self, Tensor r1, Tensor r2, str rotary_mode='half') -> Tensor",
    _rotary_mul,
)

# All names of the module torch_npu.
SUPPLIED: dict[str, Any] = {
    "_npu_fused_infer_attention_score_get_max_workspace": _get_max_workspace,
    "_npu_reshape_and_cache": _reshape_and_cache,
    **{name: getattr(torch.ops.npu, name) for name in _NAMES},
}
