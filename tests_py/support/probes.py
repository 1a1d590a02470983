# SPDX-License-Identifier: Apache-2.0
"""Attention that shows the weight of every key, so that no wrong row of K or V can hide.

The error of a result is measured in sum_j w_j |v_j|. With random values of thousands of keys the
sum of w_j v_j is as small as that error, and one wrong row changes it by less. Here the keys are
dealt out to the rows of queries: each row sees its own keys, with different weights, and no other
keys. Values are unit vectors and distinguish the keys of a row: an element of the result is the sum
of the weights of the few keys that have their 1 there. A key that is lost, counted twice or
exchanged for another changes an element by a share that no rounding explains.

Scores are sums of multiples of 1/64 below 1024, exact in float32, and bring in no error.
The expected result is computed here, in float64, from the dealt keys.
"""

import numpy as np

from support.tolerances import Expected

#: The last dimensions of q and k: eight name the owner of a key, one brings the score of an own key
#: back to 0, one makes the weights of keys differ, by up to exp(1/2). The others are 0 in q.
USED, OWNER, BIAS, NOISE = 16, slice(0, 8), 8, 9
STRENGTH = 64  # the key of another row weighs exp(-2 STRENGTH), which is 0 in float32


def codes(owners: np.ndarray) -> np.ndarray:
    """Return [..., 8]: the bits of a number, as -1 and 1."""
    return 2.0 * (owners[..., None] >> np.arange(8) & 1) - 1


def query_rows(owners: np.ndarray, head_dim: int) -> np.ndarray:
    """Return [..., head_dim]: queries that see the keys of these owners."""
    q = np.zeros((*owners.shape, head_dim), np.float32)
    used = q[..., -USED:]
    used[..., OWNER] = STRENGTH * codes(owners)
    used[..., BIAS] = -8 * STRENGTH
    used[..., NOISE] = 1
    return q


def key_rows(owners: np.ndarray, head_dim: int, rng: np.random.Generator) -> np.ndarray:
    """Return [..., head_dim]: keys of these owners, with random numbers in unread dimensions."""
    k = rng.integers(-8, 9, (*owners.shape, head_dim)).astype(np.float32)
    used = k[..., -USED:]
    used[:] = 0
    used[..., OWNER] = codes(owners)
    used[..., BIAS] = 1
    used[..., NOISE] = rng.integers(-16, 17, owners.shape) / 64
    return k


def deal(num_keys: int, num_owners: int, rng: np.random.Generator) -> np.ndarray:
    """Return an owner for each key; all owners have equally many keys."""
    return rng.permutation(num_keys) % num_owners


def deal_columns(owners: np.ndarray, v_head_dim: int, rng: np.random.Generator) -> np.ndarray:
    """Choose where the value of each key is 1; few keys of an owner share a column."""
    columns = np.empty_like(owners)
    for owner in np.unique(owners):
        (mine,) = np.nonzero(owners == owner)
        columns[mine] = rng.permutation(len(mine)) % v_head_dim
    return columns


def value_rows(columns: np.ndarray, v_head_dim: int) -> np.ndarray:
    """Return [..., v_head_dim]: unit vectors."""
    v = np.zeros((*columns.shape, v_head_dim), np.float32)
    np.put_along_axis(v, columns[..., None], 1, axis=-1)
    return v


def weights_of(
    q: np.ndarray, k: np.ndarray, counts: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return weights [rows, keys] of keys that count `counts` times, and the LSE."""
    scores = q[:, -USED:].astype(np.float64) @ k[:, -USED:].T.astype(np.float64)
    weights = np.exp(scores)  # own keys have scores around 0
    if counts is not None:
        weights *= counts
    sums = weights.sum(axis=1, keepdims=True)
    return weights / sums, np.log(sums[:, 0])


def result_of(
    q: np.ndarray,
    k: np.ndarray,
    columns: np.ndarray,
    v_head_dim: int,
    counts: np.ndarray | None = None,
) -> tuple[np.ndarray, ...]:
    """Return the arrays for `expectation`, [rows, v_head_dim] and [rows]."""
    weights, lse = weights_of(q, k, counts)
    out, squares = (
        np.stack([np.bincount(columns, row, v_head_dim) for row in x])
        for x in (weights, weights**2)
    )
    return out, lse, np.sqrt(squares), 1 / (weights**2).sum(axis=1)


def expectation(
    out: np.ndarray, lse: np.ndarray, spread: np.ndarray, num_keys: np.ndarray
) -> Expected:
    """Return `Expected`: values are not negative, so out is its magnitude; scores are exact."""
    return Expected(out, lse, out, spread, num_keys, np.zeros(lse.shape), 0)


def smallest_share(q: np.ndarray, k: np.ndarray, columns: np.ndarray, v_head_dim: int) -> float:
    """Return the least share of a key in its element of the result."""
    weights, _ = weights_of(q, k)
    out, *_ = result_of(q, k, columns, v_head_dim)
    return float((weights.max(axis=0) / out[weights.argmax(axis=0), columns]).min())
