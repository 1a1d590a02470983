# SPDX-License-Identifier: Apache-2.0
"""The latent projection of multi-head latent attention, split and normalised."""

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
    end. (Norm modules of models may round before the weight; then the last bit differs.)

    Parameters
    ----------
    x : float32, float16 or bfloat16 tensor, shape [num_rows, q_rank + kv_rank + rope]
    q_weight, kv_weight, q_bias, kv_bias : tensors, shape [q_lora_rank] and [kv_lora_rank]
        float32 or the dtype of x.
    q_eps, kv_eps : float
        Each norm's own.

    Returns
    -------
    q : tensor, shape [num_rows, q_lora_rank]
        RMS of the first columns; it and the others in the dtype of x.
    k_nope : tensor, shape [num_rows, 1, kv_lora_rank]
        RMS of the next columns.
    k_pe : tensor, shape [num_rows, 1, qk_rope_head_dim]
        The last columns, as they are.
    latent_cache : tensor, shape [num_rows, 1, kv_lora_rank + qk_rope_head_dim]
        The columns behind q as they are, in memory of their own: where context parallelism puts
        the finished keys of this rank and gathers those of all.

    Raises
    ------
    ValueError
        For sizes that do not add up to the columns of x, and shapes or dtypes that do not fit.
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
    """`split_qk_norm` with one eps for both norms and without `latent_cache`.

    Ask `can_fuse_split_qk_norm` first: under context parallelism the keys of the other ranks
    arrive in `latent_cache`, so without it each rank would attend to its own alone.

    Returns
    -------
    q, k_nope, k_pe : tensors
        Bit for bit those of `split_qk_norm` with ``q_eps = kv_eps = eps``.
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
    """Whether `fused_split_qk_norm` may stand for `split_qk_norm` in a model's forward pass.

    Not with neox rope, not from 65535 rows on (elsewhere they are a launch grid), and not where
    context parallelism splits the prefill; see `dsa_use_prefill_cp` for that.
    """
    function = "can_fuse_split_qk_norm"
    rows = _core.integer(num_rows, function, "num_rows")
    neox = _core.flag(neox_rope, function, "neox_rope")
    split = _core.flag(uses_prefill_cp, function, "uses_prefill_cp")
    return not neox and rows < 65535 and not split


def _sizes(
    function: str, x: Tensor, q_lora_rank: int, kv_lora_rank: int, qk_rope_head_dim: int
) -> tuple[int, int, int, int]:
    """Rows of x, and the sizes within its columns; the core refuses the others."""
    rows, columns = _core.shape_of(x, function, "x", 2)

    def size(value: int, argument: str) -> int:
        return min(max(0, _core.integer(value, function, argument)), columns)

    return (
        rows,
        size(q_lora_rank, "q_lora_rank"),
        size(kv_lora_rank, "kv_lora_rank"),
        size(qk_rope_head_dim, "qk_rope_head_dim"),
    )


def _results(
    function: str, x: TensorT, rows: int, q_dim: int, kv_dim: int, rope_dim: int
) -> tuple[TensorT, TensorT, TensorT]:
    return (
        empty(function, x, (rows, q_dim)),
        empty(function, x, (rows, 1, kv_dim)),
        empty(function, x, (rows, 1, rope_dim)),
    )
