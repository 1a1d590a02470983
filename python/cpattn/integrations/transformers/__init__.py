# SPDX-License-Identifier: Apache-2.0
"""Attention functions for the models of Hugging Face transformers.

`register` adds their names. A model uses them with ``attn_implementation="cpattn"``, and in
continuous batching by `use_paged`. `absorb_mla` is for models with latent caches, `use_indexer` for
sparse models.
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


# Only a run shows which of the chosen keys a row sees.
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
    """Attend for a model: to the keys that its indexer has chosen, if any, else to all.

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
        If an option would change the result and is not supported.

    Examples
    --------
    >>> AttentionInterface.register("mine", attention)  # doctest: +SKIP
    """
    if indices is not None:
        return _dsa_attention(module, query, key, value, attention_mask, indices=indices, **kwargs)
    dense = mla_attention if keeps_latents(module) else contiguous_attention
    return dense(module, query, key, value, attention_mask, **kwargs)


def register(name: str = "cpattn") -> None:
    """Register attention under `name`, and for continuous batching under ``name + "_flash"``.

    Repeated calls are allowed. Models with other implementations do not change. A compiled model
    has attention in its graph as one operator; only sparse attention breaks the graph. All calls of
    the process run on torch's threads from now on (see `torch_threads.set_thread_pool`), unless
    torch has fewer threads than cpattn or ``CPATTN_THREAD_POOL=cpattn`` is set.

    Parameters
    ----------
    name : str
        Name for the ``attn_implementation`` of models.

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
    # No mask function: continuous batching describes batches by lengths only.
    AttentionInterface.register(f"{name}_flash", disable(paged_attention_forward))


def use_paged(model: Any, name: str = "cpattn") -> ExitStack:
    """Let `model` run continuous batching on the pages of its cache, in place.

    ``model.set_attn_implementation`` takes names with "flash" as packages to load, so this function
    sets the name itself.

    Parameters
    ----------
    model : PreTrainedModel
    name : str
        Argument of `register`, which this function calls.

    Returns
    -------
    ExitStack
        Context manager; its end, or ``close()``, restores the former implementation.

    Raises
    ------
    ValueError
        If the model does not call attention functions.

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
