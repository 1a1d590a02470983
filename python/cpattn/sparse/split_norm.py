# SPDX-License-Identifier: Apache-2.0
"""Latent projection of multi-head latent attention, split and normalised."""

from __future__ import annotations

from .. import _core
from .._containers import empty
from .._types import Tensor, TensorT


def split_qk_norm(
    x: TensorT,
    q_weight: Tensor,
    kv_weight: Tensor,
    q_lora_rank: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    *,
    q_eps: float,
    kv_eps: float,
    q_bias: Tensor | None = None,
    kv_bias: Tensor | None = None,
) -> tuple[TensorT, TensorT, TensorT, TensorT]:
    """Split a projection into query and key parts, and normalise both.

    ``RMS(y) = y / sqrt(mean(y^2) + eps) * weight + bias``, all in float32 and rounded once at the
    end. Norm modules of models may round before the weight; the last bit then differs.

    Parameters
    ----------
    x : tensor [num_rows, columns], float32, float16 or bfloat16
        ``columns = q_lora_rank + kv_lora_rank + qk_rope_head_dim``, in this order.
    q_weight : tensor [q_lora_rank], float32 or the dtype of x
        Weight of the norm of the query part.
    kv_weight : tensor [kv_lora_rank], float32 or the dtype of x
        Weight of the norm of the key part.
    q_lora_rank, kv_lora_rank : int
        Columns of the query and of the key part, at least 1.
    qk_rope_head_dim : int
        Columns of the key part that carries positions; may be 0.
    q_eps, kv_eps : float
        Epsilon of each norm, at least 0.
    q_bias : tensor [q_lora_rank], float32 or the dtype of x, optional
        Default: none.
    kv_bias : tensor [kv_lora_rank], float32 or the dtype of x, optional
        Default: none.

    Returns
    -------
    q : tensor [num_rows, q_lora_rank]
        RMS of the first columns; all results have the container and dtype of x.
    k_nope : tensor [num_rows, 1, kv_lora_rank]
        RMS of the next columns.
    k_pe : tensor [num_rows, 1, qk_rope_head_dim]
        The last columns, unchanged.
    latent_cache : tensor [num_rows, 1, kv_lora_rank + qk_rope_head_dim]
        The columns after q, unchanged, in new memory: context parallelism puts this rank's finished
        keys there and gathers the keys of all ranks.

    Raises
    ------
    TypeError
        If an argument is of another type than stated, such as a list in place of a tensor.
    ValueError
        If sizes do not add up to the columns of x, an eps is negative, or shapes or dtypes do not
        fit.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> x = np.array([[3, 4, 1, 7, 8, 9]], np.float32)
    >>> q_weight, kv_weight = np.ones(2, np.float32), np.full(3, 2, np.float32)
    >>> q, k_nope, k_pe, latent_cache = cpattn.sparse.split_qk_norm(
    ...     x, q_weight, kv_weight, 2, 3, 1, q_eps=12.5, kv_eps=0.0)
    >>> q, k_pe                            # sqrt((3 * 3 + 4 * 4) / 2 + 12.5) is 5
    (array([[0.6, 0.8]], dtype=float32), array([[[9.]]], dtype=float32))
    >>> latent_cache
    array([[[1., 7., 8., 9.]]], dtype=float32)
    """
    function = "split_qk_norm"
    rows, q_dim, kv_dim, rope_dim = _sizes(function, x, q_lora_rank, kv_lora_rank, qk_rope_head_dim)
    q, k_nope, k_pe = _results(function, x, rows, q_dim, kv_dim, rope_dim)
    latent = empty(function, x, (rows, 1, kv_dim + rope_dim))
    _core.split_qk_norm(
        x, q_weight, kv_weight, q_bias, kv_bias, q_lora_rank, kv_lora_rank, qk_rope_head_dim,
        q_eps, kv_eps, q, k_nope, k_pe, latent,
    )  # fmt: skip
    return q, k_nope, k_pe, latent


def fused_split_qk_norm(
    x: TensorT,
    q_weight: Tensor,
    kv_weight: Tensor,
    q_lora_rank: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    *,
    eps: float = 1e-6,
    q_bias: Tensor | None = None,
    kv_bias: Tensor | None = None,
) -> tuple[TensorT, TensorT, TensorT]:
    """Split and normalise as `split_qk_norm` does, with one eps and without `latent_cache`.

    Ask `can_fuse_split_qk_norm` first: under context parallelism, keys of other ranks arrive in
    `latent_cache`; without it each rank would attend only to its own keys.

    Parameters
    ----------
    x, q_weight, kv_weight, q_lora_rank, kv_lora_rank, qk_rope_head_dim, q_bias, kv_bias
        See `split_qk_norm`.
    eps : float
        Epsilon of both norms, at least 0.

    Returns
    -------
    q, k_nope, k_pe : tensors
        Bitwise the results of `split_qk_norm` with ``q_eps = kv_eps = eps``.

    Raises
    ------
    TypeError, ValueError
        See `split_qk_norm`.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> x = np.array([[3, 4, 1, 7, 8, 9]], np.float32)
    >>> q, k_nope, k_pe = cpattn.sparse.fused_split_qk_norm(
    ...     x, np.ones(2, np.float32), np.ones(3, np.float32), 2, 3, 1, eps=12.5)
    >>> q, k_nope.shape
    (array([[0.6, 0.8]], dtype=float32), (1, 1, 3))
    """
    function = "fused_split_qk_norm"
    sizes = _sizes(function, x, q_lora_rank, kv_lora_rank, qk_rope_head_dim)
    q, k_nope, k_pe = _results(function, x, *sizes)
    _core.fused_split_qk_norm(
        x, q_weight, kv_weight, q_bias, kv_bias, q_lora_rank, kv_lora_rank, qk_rope_head_dim,
        eps, eps, q, k_nope, k_pe, None,
    )  # fmt: skip
    return q, k_nope, k_pe


def can_fuse_split_qk_norm(num_rows: int, *, neox_rope: bool, uses_prefill_cp: bool) -> bool:
    """Tell whether `fused_split_qk_norm` may replace `split_qk_norm` in a model's forward pass.

    It may not with neox rope, from 65535 rows on (the launch grid of an NPU), or if context
    parallelism splits the prefill.

    Parameters
    ----------
    num_rows : int
        Rows of x.
    neox_rope : bool
        Whether the model's rotary embedding has the neox style, in halves.
    uses_prefill_cp : bool
        Whether context parallelism splits this forward pass; see `dsa_use_prefill_cp`.

    Returns
    -------
    bool

    Raises
    ------
    TypeError
        If `num_rows` is no integer, or a flag no bool.

    Examples
    --------
    >>> can_fuse_split_qk_norm(65534, neox_rope=False, uses_prefill_cp=False)
    True
    >>> can_fuse_split_qk_norm(65535, neox_rope=False, uses_prefill_cp=False)
    False
    """
    function = "can_fuse_split_qk_norm"
    rows = _core.integer(num_rows, function, "num_rows")
    neox = _core.flag(neox_rope, function, "neox_rope")
    split = _core.flag(uses_prefill_cp, function, "uses_prefill_cp")
    return not neox and rows < 65535 and not split


def _sizes(
    function: str, x: Tensor, q_lora_rank: int, kv_lora_rank: int, qk_rope_head_dim: int
) -> tuple[int, int, int, int]:
    """Return the rows of x, and sizes within its columns; the core refuses other sizes."""
    rows, columns = _core.shape_of(x, function, "x", 2)
    given = {"q_lora_rank": q_lora_rank, "kv_lora_rank": kv_lora_rank}
    given["qk_rope_head_dim"] = qk_rope_head_dim
    wanted = (_core.integer(value, function, name) for name, value in given.items())
    q_dim, kv_dim, rope_dim = (min(max(0, size), columns) for size in wanted)
    return rows, q_dim, kv_dim, rope_dim


def _results(
    function: str, x: TensorT, rows: int, q_dim: int, kv_dim: int, rope_dim: int
) -> tuple[TensorT, TensorT, TensorT]:
    return (
        empty(function, x, (rows, q_dim)),
        empty(function, x, (rows, 1, kv_dim)),
        empty(function, x, (rows, 1, rope_dim)),
    )
