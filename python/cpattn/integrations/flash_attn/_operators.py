# SPDX-License-Identifier: Apache-2.0
"""Operators of torch for the functions of this package, for use in graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

import torch

from .._torch_library import Operators
from ._batch import flash_attn_func
from ._cache import flash_attn_with_kvcache
from ._ragged import flash_attn_varlen_func

Function = Callable[..., Any]
Results = tuple[torch.Tensor, torch.Tensor]

_OPTIONS = (
    "float? softmax_scale=None, bool causal=False, int[2] window_size=[-1, -1], float softcap=0.0"
)
_OF_HEADS = "*, Tensor? k_descale=None, Tensor? v_descale=None, Tensor? s_aux=None"
_RESULTS = "(Tensor out, Tensor softmax_lse)"
_BATCH = (
    f"Tensor q, Tensor k, Tensor v, float dropout_p=0.0, {_OPTIONS}, Tensor? alibi_slopes=None, "
    f"bool deterministic=False, bool return_attn_probs=False, {_OF_HEADS}"
)
_RAGGED = (
    "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, "
    f"int max_seqlen_k, float dropout_p=0.0, {_OPTIONS}, Tensor? alibi_slopes=None, "
    "bool deterministic=False, bool return_attn_probs=False, Tensor? block_table=None, "
    f"{_OF_HEADS}"
)
_CACHE = (
    "Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k=None, Tensor? v=None, "
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? cache_seqlens=None, "
    "Tensor? cache_batch_idx=None, Tensor? cache_leftpad=None, Tensor? block_table=None, "
    f"{_OPTIONS}, bool rotary_interleaved=True, Tensor? alibi_slopes=None, int num_splits=0, "
    f"bool return_softmax_lse=False, {_OF_HEADS}"
)
# Arguments that may be numbers for the functions, but only tensors in a schema.
_NUMBERS = ("cache_seqlens", "k_descale", "v_descale")


def _of_batch(q: torch.Tensor, v: torch.Tensor) -> Results:
    batch, tokens, heads = q.shape[:3]
    out = q.new_empty((batch, tokens, heads, v.shape[-1]))
    return out, q.new_empty((batch, heads, tokens), dtype=torch.float32)


def _fake_batch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Results:
    return _of_batch(q, v)


def _fake_ragged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Results:
    tokens, heads = q.shape[:2]
    out = q.new_empty((tokens, heads, v.shape[-1]))
    return out, q.new_empty((heads, tokens), dtype=torch.float32)


def _operator(
    operators: Operators, function: Function, arguments: str, flag: str, fake: Function
) -> Function:
    """Return the function as a call of its operator, which always has both results.

    ``flag`` is the argument that requests the second one.
    """
    name = function.__name__

    names = list(signature(function).parameters)
    at = names.index(flag)

    def kernel(*args: Any, **kwargs: Any) -> Results:
        if len(args) > at:
            args = (*args[:at], True, *args[at + 1 :])
        else:
            kwargs[flag] = True
        out, lse = function(*args, **kwargs)[:2]
        return out, lse

    operator = operators.define(f"{name}({arguments}) -> {_RESULTS}", kernel, fake)

    def tensor(name: str, value: Any) -> Any:
        if name not in _NUMBERS or not isinstance(value, (int, float)):
            return value
        if name == "cache_seqlens":
            return torch.tensor(value)
        return torch.tensor([value], dtype=torch.float32)  # whatever the default dtype is

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = [tensor(name, value) for name, value in zip(names, args, strict=False)]
        named = {name: tensor(name, value) for name, value in kwargs.items()}
        out, lse = operator(*given, *args[len(given) :], **named)
        if not (args[at] if len(args) > at else kwargs.get(flag, False)):
            return out
        return (out, lse, out.new_empty(0)) if flag == "return_attn_probs" else (out, lse)

    return call


def define_operators(namespace: str) -> tuple[Function, Function, Function]:
    """Define operators in ``torch.ops.<namespace>``, and return functions that call them.

    Returns
    -------
    flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache : callables
        Functions of the package, in eager code and graphs; ``window_size`` is a pair of ints.
    """
    operators = Operators(namespace)
    probabilities = "return_attn_probs"
    return (
        _operator(operators, flash_attn_func, _BATCH, probabilities, _fake_batch),
        _operator(operators, flash_attn_varlen_func, _RAGGED, probabilities, _fake_ragged),
        _operator(operators, flash_attn_with_kvcache, _CACHE, "return_softmax_lse", _fake_batch),
    )
