# SPDX-License-Identifier: Apache-2.0
"""The latent projection of multi-head latent attention, split and normalised."""

from __future__ import annotations

from . import _core
from ._containers import Tensor, empty, shape_of
from .context_parallel import ForwardMode


def split_qk_norm(
    x: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
    return _split(
        "split_qk_norm", x, q_weight, kv_weight, q_bias, kv_bias,
        (q_lora_rank, kv_lora_rank, qk_rope_head_dim), q_eps, kv_eps, with_latent=True,
    )  # fmt: skip


def fused_split_qk_norm(
    x: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    q_lora_rank: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    *,
    eps: float = 1e-6,
    q_bias: Tensor | None = None,
    kv_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`split_qk_norm` with one eps for both norms and without `latent_cache`.

    Ask `can_fuse_split_qk_norm` first: under context parallelism the keys of the other ranks
    arrive in `latent_cache`, so without it each rank would attend to its own alone.

    Returns
    -------
    q, k_nope, k_pe : tensors
        Bit for bit those of `split_qk_norm` with ``q_eps = kv_eps = eps``.
    """
    return _split(
        "fused_split_qk_norm", x, q_weight, kv_weight, q_bias, kv_bias,
        (q_lora_rank, kv_lora_rank, qk_rope_head_dim), eps, eps, with_latent=False,
    )[:3]  # fmt: skip


def can_fuse_split_qk_norm(num_rows: int, *, neox_rope: bool, uses_prefill_cp: bool) -> bool:
    """Whether `fused_split_qk_norm` may stand for `split_qk_norm` in a model's forward pass.

    Not with neox rope, not from 65535 rows on (elsewhere they are a launch grid), and not where
    context parallelism splits the prefill; see `dsa_use_prefill_cp` for that.
    """
    return not neox_rope and num_rows < 65535 and not uses_prefill_cp


def dsa_use_prefill_cp(
    forward_mode: ForwardMode | None, *, has_cp_metadata: bool, enabled: bool
) -> bool:
    """Whether this forward pass of a sparse-attention (DSA) model is split over ranks.

    It is if context parallelism is enabled, the batch got metadata for it, and its mode is one
    whose new tokens may be split.
    """
    if forward_mode is None:
        return False
    return has_cp_metadata and enabled and ForwardMode(forward_mode).is_context_parallel_extend()


def _split(
    function: str,
    x: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    q_bias: Tensor | None,
    kv_bias: Tensor | None,
    dims: tuple[int, int, int],
    q_eps: float,
    kv_eps: float,
    *,
    with_latent: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = shape_of(x, f"{function}: x", 2)
    # The core refuses what is not within x.
    q_dim, kv_dim, rope_dim = (min(max(0, dim), columns) for dim in dims)
    q = empty(x, (rows, q_dim))
    k_nope = empty(x, (rows, 1, kv_dim))
    k_pe = empty(x, (rows, 1, rope_dim))
    latent = empty(x, (rows, 1, kv_dim + rope_dim)) if with_latent else None
    _core.split_qk_norm(
        function, x, q_weight, kv_weight, q_bias, kv_bias, *dims, q_eps, kv_eps, q, k_nope, k_pe,
        latent,
    )  # fmt: skip
    return q, k_nope, k_pe, latent
