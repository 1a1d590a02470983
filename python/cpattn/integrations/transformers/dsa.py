# SPDX-License-Identifier: Apache-2.0
"""Sparse attention of DeepSeek-V3.2 and its like in transformers, over the chosen keys only.

The eager attention of transformers hides other keys by a dense mask. Here a query reads its keys in
place, and `use_indexer` chooses them without a matrix of scores.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import disable

from ...attention import paged_attention
from ...sparse.indexer import indexer_topk
from ...sparse.sparse_mla import flash_mla_sparse_fwd
from .._ragged import dense_rows
from ._methods import Replaced
from .contiguous import UNSUPPORTED, check_supported, contiguous_attention
from .masks import FUNCTION, as_bool
from .mla import absorb, keeps_latents, mla_attention, project

#: Indexers that compute alike, but for their rotation: in halves, or interleaved.
_ROTATIONS = {
    "AXK2Indexer": "apply_rotary_pos_emb",
    "DeepseekV32Indexer": "apply_rotary_pos_emb",
    "Dots3NoteTextIndexer": "apply_rotary_pos_emb_interleave",
    "GlmMoeDsaIndexer": "apply_rotary_pos_emb_interleave",
}


def dsa_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float,
    indices: Tensor,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend to the keys that `indices` chooses and the mask shows.

    Parameters
    ----------
    module : torch.nn.Module
        The attention layer.
    query : tensor, shape [batch, heads, queries, head_dim]
    key, value : tensors, shape [batch, heads, keys, dim]
        Or, with `absorb_mla`, the latents and the rotated keys, with one head.
    attention_mask : tensor, shape [batch or 1, 1, queries, keys]
        Mask with True, or 0 if it has floats, for a visible key.
    scaling : float
    indices : int32 tensor, shape [batch, queries, topk]
        Positions, each once, in any order; -1 for none. A row with fewer than topk visible keys may
        also have invisible positions, which are hidden.
    **kwargs
        Dropout, sinks, caps and biases are refused.

    Returns
    -------
    out : tensor, shape [batch, queries, heads, v_head_dim]
    None
    """
    check_supported(
        query, key, value,
        dropout=kwargs.get("dropout", 0.0),
        options=kwargs,
        unsupported=(*UNSUPPORTED, "softcap", "s_aux"),
    )  # fmt: skip
    if indices.shape[-1] >= key.shape[2]:  # all keys are chosen: the mask alone decides
        dense = mla_attention if keeps_latents(module) else contiguous_attention
        return dense(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    shape = *indices.shape[:2], key.shape[2]
    visible = as_bool(attention_mask, shape)
    visible = visible.gather(-1, indices.clamp(min=0).long()) & (indices >= 0)
    attend = _attend_latents if keeps_latents(module) else _attend_heads
    return attend(module, query, key, value, scaling, indices, visible), None


def _attend_latents(
    module: Any,
    query: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    scaling: float,
    indices: Tensor,
    visible: Tensor,
) -> Tensor:
    batch, _, keys, rank = latent.shape
    first = keys * torch.arange(batch, dtype=torch.int32)[:, None, None]
    out, _, _ = flash_mla_sparse_fwd(
        absorb(module, query).transpose(1, 2).flatten(0, 1),
        torch.cat([latent, k_rope], -1).view(batch * keys, 1, -1),
        torch.where(visible, indices + first, -1).flatten(0, 1),
        scaling,
        d_v=rank,
    )
    return project(module, out).unflatten(0, (batch, -1))


def _attend_heads(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    indices: Tensor,
    visible: Tensor,
) -> Tensor:
    """Attend with each query as a sequence of its own, whose pages are its single keys."""
    batch, heads, queries, _ = query.shape
    query, key, value = dense_rows(query), dense_rows(key), dense_rows(value)
    out = query.new_empty(batch, queries, heads, value.shape[-1])
    for b in range(batch):
        seen = visible[b].sum(-1)
        paged_attention(
            query[b].transpose(0, 1), key[b].transpose(0, 1).unsqueeze(2),
            value[b].transpose(0, 1).unsqueeze(2), kv_layout="HND", q_lens=[1] * queries,
            kv_indptr=torch.nn.functional.pad(seen.cumsum(0), (1, 0)),
            kv_indices=indices[b][visible[b]], last_page_len=(seen > 0).int(), causal=False,
            scale=scaling, out=out[b],
        )  # fmt: skip
    return out


def use_indexer(model: nn.Module, name: str = "cpattn") -> Replaced:
    """Let the indexers of a DSA model choose keys by `cpattn.sparse.indexer_topk`.

    Scores equal those of transformers up to rounding, and are never stored.

    Parameters
    ----------
    model : torch.nn.Module
        DeepSeek-V3.2, GLM-5, A.X K2 or dots3 of transformers.
    name : str
        Name given to `register`. With another attention implementation, the model's own indexers
        choose.

    Returns
    -------
    Replaced
        Its ``remove()``, or the end of ``with``, restores the model's own methods.

    Raises
    ------
    ValueError
        If the model has no such indexers, or they are replaced already.

    Examples
    --------
    >>> with use_indexer(model):  # doctest: +SKIP
    ...     model.generate(**inputs)
    """
    choose = disable(_choose)  # a compiled model breaks its graph here

    def forward(module: Any, *args: Any, **kwargs: Any) -> Tensor:
        if module.config._attn_implementation != name:
            own: Tensor = type(module).forward(module, *args, **kwargs)
            return own
        chosen: Tensor = choose(module, rotation_of(module), *args, **kwargs)
        return chosen

    indexers = [module for module in model.modules() if rotation_of(module)]
    if not indexers:
        raise ValueError(
            f"{FUNCTION}.use_indexer: the model must have the indexers of "
            f"DeepSeek-V3.2, GLM-5, A.X K2 or dots3, got {type(model).__name__}"
        )
    return Replaced(indexers, "forward", forward)


def rotation_of(module: Any) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return the rotation of an indexer, or None for another module."""
    kind = type(module)
    name = _ROTATIONS.get(kind.__name__)
    rotation = getattr(sys.modules[kind.__module__], name) if name else None
    return cast("Callable[..., tuple[Tensor, Tensor]] | None", rotation)


@torch.no_grad()
def _choose(
    module: Any,
    rotate: Callable[..., tuple[Tensor, Tensor]],
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    position_ids: Any = None,
    past_key_values: Any = None,
    cache: Any = None,
) -> Tensor:
    """Choose keys like the indexer's own ``forward``: int32 [batch, queries, topk], ascending.

    -1 replaces invisible keys, which the original lists if there are too few others. From
    transformers 5.24 on, the cache is `cache`.
    """
    batch, queries, _ = hidden_states.shape
    q, k, weights = index_rows(module, rotate, hidden_states, q_resid, position_embeddings)
    cache = past_key_values if cache is None else cache
    if cache is not None:
        k = cache.update_indexer(k, module.layer_idx)
    keys = k.shape[1]
    if keys <= module.index_topk:  # all keys are chosen, for any scores
        return torch.arange(keys, dtype=torch.int32).expand(batch, queries, keys)
    shape = batch, queries, keys
    begin, end = visible_ranges(as_bool(attention_mask.unsqueeze(1), shape))
    first = keys * torch.arange(batch)[:, None]
    dtype = q.dtype if q.dtype == torch.bfloat16 else torch.float32
    chosen = indexer_topk(
        q.flatten(0, 1).to(dtype),
        k.flatten(0, 1).to(dtype),
        weights.flatten(0, 1),
        (begin + first).flatten(),
        (end + first).flatten(),
        topk=module.index_topk,
        sorted=False,
    ).view(batch, queries, -1)
    return torch.where(chosen >= 0, chosen + begin[..., None].int(), -1)


def index_rows(
    module: Any,
    rotate: Callable[..., tuple[Tensor, Tensor]],
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return an indexer's queries, its keys, [batch, queries, dim], and its float32 weights.

    Scores lack positive factors, which do not change their order.
    """
    rope = module.qk_rope_head_dim
    q = module.wq_b(q_resid).unflatten(-1, (module.n_heads, module.head_dim))
    k = module.k_norm(module.wk(hidden_states)).unsqueeze(2)
    rotated = rotate(q[..., :rope], k[..., :rope], *position_embeddings, unsqueeze_dim=2)
    q = torch.cat([rotated[0], q[..., rope:]], -1)
    k = torch.cat([rotated[1], k[..., rope:]], -1).squeeze(2)
    weights = module.weights_proj(hidden_states.to(module.weights_proj.weight.dtype)).float()
    return q, k, weights


def visible_ranges(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return first visible key and end for each row of a bool mask [batch, queries, keys], int64.

    A row with a gap, as padding within a sequence leaves, is refused.
    """
    bits = mask.view(torch.uint8)
    seen = bits.sum(-1)
    begin = bits.argmax(-1)  # the first of them
    end = torch.where(seen > 0, mask.shape[-1] - bits.flip(-1).argmax(-1), begin)
    if (end - begin != seen).any():
        raise ValueError(
            f"{FUNCTION}.use_indexer: what a row of the mask shows must be "
            "one range of keys, as after padding on the left"
        )
    return begin, end
