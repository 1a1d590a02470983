# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention of transformers on the latents instead of expanded keys.

Its caches have a latent vector and a rotated key per token, shared by all heads. transformers
expands them to keys and values of each head in every call, for all cached tokens::

    key[h] = [latent @ w_key[h].T, k_rope]         value[h] = latent @ w_value[h].T

The same scores result from queries multiplied by the up-projection of the keys, and the same
outputs from a sum of latents that is projected afterwards, as in serving engines::

    score[h] = [q_nope[h] @ w_key[h], q_rope[h]] . [latent, k_rope]
    out[h] = (softmax(scale * score[h]) @ latent) @ w_value[h].T

A token then costs more than with expanded keys, but cached tokens cost nothing extra.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ._methods import Replaced
from .contiguous import contiguous_attention
from .masks import FUNCTION


def absorb_mla(model: nn.Module, name: str = "cpattn") -> Replaced:
    """Let the MLA layers of a model attend to their latents whenever that is cheaper.

    Parameters
    ----------
    model : torch.nn.Module
        Model of transformers with layers that have ``expand_kv``: DeepSeek-V2, V3, V3.2, GLM-4 MoE
        Lite, GLM-5 and others. Weights are neither copied nor changed.
    name : str
        Name given to `register`. With another attention implementation, layers expand their
        latents.

    Returns
    -------
    Replaced
        Its ``remove()``, or the end of ``with``, restores the model's own methods.

    Raises
    ------
    ValueError
        If the model has no such layers, a layer's ``kv_b_proj`` has a bias or is no
        `torch.nn.Linear`, or the model is absorbed already.

    Examples
    --------
    >>> with absorb_mla(model):  # doctest: +SKIP
    ...     model.generate(**inputs)
    """

    def expand_kv(module: Any, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        if keeps_latents(module):
            return latent, k_rope
        expanded: tuple[Tensor, Tensor] = type(module).expand_kv(module, latent, k_rope)
        return expanded

    expand_kv.implementation = name  # type: ignore[attr-defined]
    layers: list[Any] = [module for module in model.modules() if hasattr(type(module), "expand_kv")]
    if not layers:
        raise ValueError(
            f"{FUNCTION}.absorb_mla: the model must have layers with latents "
            f"(a method expand_kv), got {type(model).__name__}"
        )
    for layer in layers:
        up_projections(layer)
    return Replaced(layers, "expand_kv", expand_kv)


def keeps_latents(module: Any) -> bool:
    """Tell whether an attention function gets the latents of this layer as key and value."""
    name = getattr(vars(module).get("expand_kv"), "implementation", None)
    return name is not None and name == module.config._attn_implementation


def mla_attention(
    module: Any, query: Tensor, latent: Tensor, k_rope: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute dense attention of a layer that keeps its latents.

    Parameters
    ----------
    module : torch.nn.Module
        The attention layer, for its weights ``kv_b_proj`` and its dimensions.
    query : tensor, shape [batch, heads, queries, nope + rope]
    latent, k_rope : tensors, shape [batch, 1, keys, rank], [batch, 1, keys, rope]
    attention_mask, **kwargs
        Arguments of contiguous attention.

    Returns
    -------
    out : tensor, shape [batch, queries, heads, v_head_dim]
    None
    """
    if not absorbing_is_cheaper(module, query.shape[2], latent.shape[2]):
        key, value = type(module).expand_kv(module, latent, k_rope)
        return contiguous_attention(module, query, key, value, attention_mask, **kwargs)
    kv = torch.cat([latent, k_rope], -1)
    out, _ = contiguous_attention(
        module, absorb(module, query), kv, kv[..., : latent.shape[-1]], attention_mask, **kwargs
    )
    return project(module, out), None


def absorbing_is_cheaper(module: Any, queries: int, keys: int) -> bool:
    """Tell whether absorbed queries take fewer multiplications than expanded keys."""
    rank, rope, nope = module.kv_lora_rank, module.qk_rope_head_dim, module.qk_nope_head_dim
    projections = rank * (nope + module.v_head_dim)
    absorbed = queries * (keys * (2 * rank + rope) + projections)
    expanded = queries * keys * (nope + rope + module.v_head_dim) + keys * projections
    return absorbed < expanded


def up_projections(module: Any) -> tuple[Tensor, Tensor]:
    """Return views of the weights, [heads, nope, rank] and [heads, v_head_dim, rank].

    ValueError for a projection with more than weights, such as an adapter or quantisation.
    """
    if type(module.kv_b_proj) is not nn.Linear or module.kv_b_proj.bias is not None:
        raise ValueError(
            f"{FUNCTION}.absorb_mla: kv_b_proj must be a torch.nn.Linear without bias, whose "
            f"weights can be divided, got {module.kv_b_proj}"
        )
    nope, value = module.qk_nope_head_dim, module.v_head_dim
    w_key, w_value = module.kv_b_proj.weight.unflatten(0, (-1, nope + value)).split(
        [nope, value], 1
    )
    return w_key, w_value


def absorb(module: Any, query: Tensor) -> Tensor:
    """Return absorbed queries for latents, [batch, heads, queries, rank + rope]."""
    nope, rope = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
    return torch.cat([torch.einsum("bhsn,hnc->bhsc", nope, up_projections(module)[0]), rope], -1)


def project(module: Any, out: Tensor) -> Tensor:
    """Project sums of latents [..., heads, rank] to values [..., heads, v_head_dim]."""
    return torch.einsum("...hc,hvc->...hv", out, up_projections(module)[1])
