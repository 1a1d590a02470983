# SPDX-License-Identifier: Apache-2.0
"""Attention functions for the models of Hugging Face transformers.

`register` gives them names. A model uses them by ``attn_implementation="cpattn"``, and continuous
batching by `use_paged`. `absorb_mla` is for models with latent caches, `use_indexer` for sparse
ones.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch.compiler import disable

from ..._types import AnyTensor
from .._torch_threads import use_torch_threads
from .context_parallel import ContextParallelModel
from .contiguous import contiguous_attention
from .dsa import dsa_attention, use_indexer
from .masks import check_model, visibility_mask
from .mla import absorb_mla, keeps_latents, mla_attention
from .paged import paged_attention_forward

__all__ = [
    "ContextParallelModel",
    "absorb_mla",
    "attention",
    "register",
    "use_indexer",
    "use_paged",
]


# Which keys a row sees of those that were chosen is known only when it runs.
_dsa_attention = disable(dsa_attention)


def attention(
    module: Any,
    query: AnyTensor,
    key: AnyTensor,
    value: AnyTensor,
    attention_mask: AnyTensor | None,
    *,
    indices: AnyTensor | None = None,
    **kwargs: Any,
) -> tuple[AnyTensor, None]:
    """Attend for a model: to the chosen keys if it brings any, else to all.

    Parameters
    ----------
    module, query, key, value, attention_mask
        Arguments that transformers gives to each `AttentionInterface`, heads before tokens.
    indices : int tensor [batch, tokens, topk], optional
        Keys that an indexer has chosen for each token.
    **kwargs
        Options of the layer, such as ``scaling``, ``sliding_window``, ``softcap`` and ``s_aux``.

    Returns
    -------
    out : tensor [batch, tokens, num_heads, v_head_dim]
    weights : None

    Raises
    ------
    TypeError, ValueError
        For options that would change the result and are not supported.

    Examples
    --------
    >>> AttentionInterface.register("mine", attention)  # doctest: +SKIP
    """
    if indices is not None:
        return _dsa_attention(module, query, key, value, attention_mask, indices=indices, **kwargs)
    dense = mla_attention if keeps_latents(module) else contiguous_attention
    return dense(module, query, key, value, attention_mask, **kwargs)


def register(name: str = "cpattn") -> None:
    """Register attention under `name`, and that of continuous batching under ``name + "_flash"``.

    May be called again. Nothing changes for models of other implementations. A compiled model has
    attention in its graph as one operator, and leaves the graph for sparse attention alone. All
    calls of the process run on torch's threads from now on, by `torch_threads.set_thread_pool`,
    unless these are fewer than cpattn's or ``CPATTN_THREAD_POOL=cpattn`` is set.

    Parameters
    ----------
    name : str
        Name that models give as ``attn_implementation``.

    Raises
    ------
    ImportError
        If transformers is not installed.

    Examples
    --------
    >>> import cpattn.integrations.transformers as integration
    >>> integration.register()  # doctest: +SKIP
    >>> model = AutoModelForCausalLM.from_pretrained(
    ...     path, attn_implementation="cpattn")  # doctest: +SKIP
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    use_torch_threads()
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, visibility_mask)
    # No mask function: continuous batching describes its batches by lengths alone.
    AttentionInterface.register(f"{name}_flash", disable(paged_attention_forward))


def use_paged(model: Any, name: str = "cpattn") -> ExitStack:
    """Let `model` run continuous batching on the pages of its cache, in place.

    ``model.set_attn_implementation`` takes names with "flash" for packages to load, so this sets
    the name itself.

    Parameters
    ----------
    model : PreTrainedModel
    name : str
        The argument of `register`, which this calls.

    Returns
    -------
    ExitStack
        A context manager; its end, or ``close()``, brings the former implementation back.

    Raises
    ------
    ValueError
        For a model that calls no attention functions.

    Examples
    --------
    >>> with use_paged(model):  # doctest: +SKIP
    ...     model.generate_batch(prompts)
    """
    check_model(type(model))
    register(name)
    before = model.config._attn_implementation
    model.config._attn_implementation = f"{name}_flash"
    restore = ExitStack()
    restore.callback(setattr, model.config, "_attn_implementation", before)
    return restore
