# SPDX-License-Identifier: Apache-2.0
"""Merge of states with log-sum-exps to base 2."""

from __future__ import annotations

import math

from ... import merge
from ..._types import AnyTensor

LOG2E = math.log2(math.e)
LN2 = math.log(2)


def merge_state(
    v_a: AnyTensor, s_a: AnyTensor, v_b: AnyTensor, s_b: AnyTensor
) -> tuple[AnyTensor, AnyTensor]:
    """Merge attention over two disjoint sets of keys.

    Parameters
    ----------
    v_a, v_b : tensors, shape [tokens, heads, head_dim]
    s_a, s_b : float32 tensors, shape [tokens, heads]
        Log-sum-exp to base 2; -inf marks a row without keys.

    Returns
    -------
    v, s
        New tensors.

    Raises
    ------
    TypeError, ValueError
        As for `cpattn.merge_state`.

    Examples
    --------
    >>> import torch
    >>> ones, half = torch.ones(3, 2, 8), torch.zeros(3, 2)
    >>> float(merge_state(ones, half, -ones, half)[1][0, 0])  # log2(1 + 1)
    1.0
    """
    v, s = merge.merge_state(v_a.clone(), s_a.float() * LN2, v_b, s_b.float() * LN2)
    return v, s.mul_(LOG2E)


def merge_state_in_place(
    v: AnyTensor,
    s: AnyTensor,
    v_other: AnyTensor,
    s_other: AnyTensor,
    mask: AnyTensor | None = None,
) -> None:
    """Merge a second state into the first.

    Parameters
    ----------
    v, v_other : tensors, shape [tokens, heads, head_dim]
    s, s_other : float32 tensors, shape [tokens, heads]
        Log-sum-exp to base 2.
    mask : bool tensor, shape [tokens], optional
        Tokens to merge; other tokens keep their state.

    Raises
    ------
    TypeError, ValueError
        As for `cpattn.merge_state`.

    Examples
    --------
    >>> import torch
    >>> v, s = torch.ones(3, 2, 8), torch.zeros(3, 2)
    >>> merge_state_in_place(v, s, -v, s.clone(), mask=torch.tensor([True, False, False]))
    >>> s[:, 0].tolist()
    [1.0, 0.0, 0.0]
    """
    rows = slice(None) if mask is None else mask.bool()
    v[rows], s[rows] = merge_state(v[rows], s[rows], v_other[rows], s_other[rows])


def merge_states(v: AnyTensor, s: AnyTensor) -> tuple[AnyTensor, AnyTensor]:
    """Merge attention over several disjoint sets of keys, in float32 and rounded once.

    Parameters
    ----------
    v : tensor, shape [tokens, num_states, heads, head_dim]
    s : float32 tensor, shape [tokens, num_states, heads]
        Log-sum-exp to base 2.

    Returns
    -------
    v : tensor, shape [tokens, heads, head_dim]
    s : float32 tensor, shape [tokens, heads]

    Raises
    ------
    TypeError, ValueError
        As for `cpattn.merge_states`, and if there is no state.

    Examples
    --------
    >>> import torch
    >>> v, s = merge_states(torch.ones(3, 4, 2, 8), torch.zeros(3, 4, 2))
    >>> v.shape, float(s[0, 0])  # log2(4)
    (torch.Size([3, 2, 8]), 2.0)
    """
    if v.ndim != 4 or v.shape[1] == 0:
        raise ValueError(
            "merge_states: v must be [tokens, num_states, heads, head_dim] with a state at least, "
            f"got shape {list(v.shape)}"
        )
    out, lse = merge.merge_states(v, s.float() * LN2)
    return out, lse.mul_(LOG2E)
