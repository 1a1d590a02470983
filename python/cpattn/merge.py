# SPDX-License-Identifier: Apache-2.0
"""Merge of attention over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Sequence

from . import _core
from ._containers import empty
from ._types import AnyTensor, Tensor, TensorT


def merge_state(
    out_a: TensorT, lse_a: TensorT, out_b: Tensor, lse_b: Tensor
) -> tuple[TensorT, TensorT]:
    """Merge attention over two disjoint key sets, in place into the first.

    With weights ``w = exp(lse)``, the result is the weighted mean of the outputs and the logarithm
    of the sum of the weights. Two rows without keys give zeros and LSE -inf.

    Parameters
    ----------
    out_a, out_b : tensors [num_tokens, num_heads, head_dim], float32, float16 or bfloat16
        Normalised partial outputs. ``out_a`` is overwritten.
    lse_a, lse_b : tensors [num_tokens, num_heads], float32
        Natural log-sum-exp of the scores; -inf marks a row without keys, whose output is ignored.
        ``lse_a`` is overwritten.

    Returns
    -------
    out_a, lse_a
        The first two arguments themselves, merged.

    Raises
    ------
    TypeError
        If an argument is no tensor, or dtypes do not fit.
    ValueError
        If shapes differ, or ``out_a`` or ``lse_a`` overlaps another argument.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> ones, lse = np.ones((1, 1, 16), np.float32), np.zeros((1, 1), np.float32)
    >>> out, lse = cpattn.merge_state(ones, lse, 5 * ones, lse + np.float32(np.log(3)))
    >>> float(out[0, 0, 0].round(3)), float(np.exp(lse)[0, 0].round(3))     # (1 + 3 * 5) / 4
    (4.0, 4.0)
    """
    _core.merge_state(out_a, lse_a, out_b, lse_b)
    return out_a, lse_a


def merge_states(
    outs: TensorT | Sequence[TensorT],
    lses: Tensor | Sequence[Tensor],
    *,
    sinks: Tensor | None = None,
    out: TensorT | None = None,
    lse: TensorT | None = None,
) -> tuple[TensorT, TensorT]:
    """Merge attention over any number of disjoint key sets.

    With ``w[i] = exp(lses[i])``::

        out = sum(w[i] * outs[i]) / sum(w)
        lse = log(sum(w))

    Parts merge in order, with the bits of repeated calls of `merge_state` in float32, so the bits
    depend on the order; 16-bit results are rounded once, at the end.

    Parameters
    ----------
    outs : list or tuple of tensors [num_tokens, num_heads, head_dim], or one tensor
        Normalised partial outputs, at least one, float32, float16 or bfloat16, never copied. One
        tensor has all parts as [num_tokens, num_parts, num_heads, head_dim], as in FlashInfer.
    lses : list or tuple of tensors [num_tokens, num_heads], or one tensor, as `outs`; float32
        Natural log-sum-exp of the scores; -inf marks a row without keys, whose output is ignored.
    sinks : tensor [num_heads], float32, optional
        Logits without value that no part has counted. Each takes its weight of ``out`` once (all
        weight for +inf) and does not change ``lse``.
    out, lse : tensors, optional
        Receive the results and are returned. Each may be the first part of its kind, to merge in
        place, and must not overlap any other argument.

    Returns
    -------
    out : tensor [num_tokens, num_heads, head_dim], container and dtype of the parts
    lse : tensor [num_tokens, num_heads], float32
        Rows without keys in any part are zeros, with LSE -inf.

    Raises
    ------
    TypeError
        If an argument is no tensor, or no list of tensors.
    ValueError
        If there is no part, shapes or dtypes differ, an LSE is +inf, or a result overlaps an
        argument; nothing is written then.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> ones, lse = np.ones((1, 1, 16), np.float32), np.zeros((1, 1), np.float32)
    >>> out, lse = cpattn.merge_states([ones, 2 * ones, 6 * ones], [lse, lse, lse])
    >>> float(out[0, 0, 0].round(3)), float(np.exp(lse)[0, 0].round(3))     # (1 + 2 + 6) / 3
    (3.0, 3.0)
    """
    function = "merge_states"
    if out is None or lse is None:
        like, shape = _first_part(function, outs)
        out = empty(function, like, shape) if out is None else out
        lse = empty(function, like, shape[:2], "float32") if lse is None else lse
    _core.merge_states(outs, lses, sinks, out, lse)
    return out, lse


def _first_part(function: str, outs: AnyTensor) -> tuple[AnyTensor, tuple[int, ...]]:
    """Return a tensor with the container and dtype of the parts, and the shape of each part."""
    if not isinstance(outs, (list, tuple)):
        tokens, _, heads, dim = _core.shape_of(outs, function, "outs", 4)
        return outs, (tokens, heads, dim)
    if not outs:
        raise ValueError(f"{function}: outs must have at least one part, got 0")
    return outs[0], _core.shape_of(outs[0], function, "outs[0]", 3)
