# SPDX-License-Identifier: Apache-2.0
"""Attention of dense batches, as frameworks describe it, in one call of `paged_attention`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

import cpattn


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
    """Attend to all keys of dense batches, or to keys in a window at given positions.

    Keys of a sequence are one page of a cache, with heads before tokens; tensors are [batch, heads,
    tokens, dim]. Row i of sequence s is at position ``first[s] + i``, and sees `left` keys before
    its position and `right` after it, None for all; `right` is 0 for causal attention. A mask
    broadcasts to [batch, heads, rows, keys]: bools, True for a visible key, or numbers.
    """
    batch, num_heads, rows, _ = q.shape
    keys = [k.shape[2]] * batch if kv_lens is None else list(kv_lens)
    if mask is not None:
        options |= masking(mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape)), rows, keys)
    out = cpattn.paged_attention(
        q.swapaxes(1, 2).reshape(batch * rows, num_heads, -1), k, v,
        q_lens=[rows] * batch, kv_lens=keys, first_positions=first, causal=False,
        window=(left, right), block_tables=[[page] for page in range(batch)], kv_layout="HND",
        **options,
    )  # fmt: skip
    return out.reshape(batch, rows, num_heads, -1).swapaxes(1, 2)


def masking(mask: Any, rows: int, keys: Sequence[int]) -> dict[str, Any]:
    """Return a bool mask if one for all heads is enough, else a bias that hides keys."""
    if str(mask.dtype).removeprefix("torch.") != "bool":
        return {"bias": mask}
    hidden = ~np.asarray(mask)
    if mask.shape[1] > 1:
        return {"bias": np.where(hidden, np.float32(-np.inf), np.float32(0))}
    seen = np.broadcast_to(~hidden[:, 0], (len(keys), rows, mask.shape[-1]))
    parts = [sequence[:, :n].ravel() for sequence, n in zip(seen, keys, strict=True)]
    return {"custom_mask": np.concatenate(parts)}
