# SPDX-License-Identifier: Apache-2.0
"""Attention of dense batches, as frameworks describe it, in one call of `paged_attention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import cpattn
from outside.suite import InexpressibleError


def attend(
    q: Any,
    k: Any,
    v: Any,
    *,
    first: Sequence[int],
    kv_lens: Sequence[int] | None = None,
    left: int | None = None,
    right: int | None = None,
    mask: Any = None,
    **options: Any,
) -> Any:
    """Attend to all keys of dense batches, or to those of a window that stands where it is told.

    Keys of a sequence are one page of a cache, with heads before tokens; tensors are [batch, heads,
    tokens, dim]. Row i of sequence s stands at position ``first[s] + i``, and sees `left` keys
    before its position and `right` behind it; `right` is 0 for causal attention. In cpattn the last
    row stands at the last key. Where it should not, keys that no row sees are cut off, and the
    window is moved by what then is left of the difference. A mask broadcasts to [batch, heads,
    rows, keys]: bools, True for a key that is seen, or numbers.
    """
    batch, num_heads, rows, _ = q.shape
    keys = [k.shape[2]] * batch if kv_lens is None else list(kv_lens)
    if right is not None:
        keys = [max(0, min(n, at + rows + right)) for n, at in zip(keys, first, strict=True)]
    if left is not None or right is not None:
        shifts = {n - rows - at for n, at in zip(keys, first, strict=True)}
        options |= visibility(left, right, shifts)
    else:
        options |= {"causal": False}
    if mask is not None:
        options |= masking(mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape)), rows, keys)
    out = cpattn.paged_attention(
        q.swapaxes(1, 2).reshape(batch * rows, num_heads, -1), k, v,
        q_lens=[rows] * batch, kv_lens=keys, block_tables=[[page] for page in range(batch)],
        kv_layout="HND", **options,
    )  # fmt: skip
    return out.reshape(batch, rows, num_heads, -1).swapaxes(1, 2)


def visibility(left: int | None, right: int | None, shifts: set[int]) -> dict[str, Any]:
    """Return a window for rows whose positions in cpattn are larger by a shift, one for all."""
    if len(shifts) > 1:
        raise InexpressibleError("sequences whose windows are moved by different numbers of keys")
    (shift,) = shifts
    left = None if left is None else left + shift
    right = None if right is None else right - shift
    if (left or 0) < 0 or (right or 0) < 0:
        raise InexpressibleError("a window that does not hold the row's own position in cpattn")
    if right == 0:
        return {"causal": True, "window": left, "allow_short_kv": True}
    return {"causal": False, "window": (left, right)}


def masking(mask: Any, rows: int, keys: Sequence[int]) -> dict[str, Any]:
    """Return a mask of bools if one for all heads is enough, else a bias that hides keys."""
    if mask.dtype not in (bool, getattr(mask.dtype, "bool", None)):
        return {"bias": mask}
    hidden = ~np.asarray(mask)
    if mask.shape[1] > 1:
        return {"bias": np.where(hidden, np.float32(-np.inf), np.float32(0))}
    seen = np.broadcast_to(~hidden[:, 0], (len(keys), rows, mask.shape[-1]))
    parts = [sequence[:, :n].ravel() for sequence, n in zip(seen, keys, strict=True)]
    return {"custom_mask": np.concatenate(parts)}
