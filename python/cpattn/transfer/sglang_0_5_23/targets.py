# SPDX-License-Identifier: Apache-2.0
"""Prefill ranks from which a decode rank pulls, over all groups of both servers."""

from __future__ import annotations

from typing import NamedTuple

from ..._arguments import at_least, flag
from .pointers import decode_targets


class PullTargets(NamedTuple):
    """Prefill ranks from which a decode rank pulls, and the expected messages on both sides.

    Attributes
    ----------
    target_tp_rank : int or None
        Sending rank among ranks that hold the same latent; the others are dummies. None if all of
        `target_tp_ranks` send, because each holds its own pages.
    target_tp_ranks, target_cp_ranks, target_pp_ranks : list of int
        The decode rank registers with all combinations of these.
    required_dst_info_num : int
        Number of decode ranks that each of them waits for.
    required_prefill_response_num : int
        Number of answers that the decode rank waits for.

    Examples
    --------
    >>> targets = pull_targets(1, prefill_tp_size=4, decode_tp_size=2, is_mla=False)
    >>> targets.target_tp_ranks, targets.required_prefill_response_num
    ([2, 3], 2)
    """

    target_tp_rank: int | None
    target_tp_ranks: list[int]
    target_cp_ranks: list[int]
    target_pp_ranks: list[int]
    required_dst_info_num: int
    required_prefill_response_num: int


PullTargets.__module__ = "cpattn.transfer.sglang_0_5_23"


def pull_targets(
    engine_rank: int,
    *,
    prefill_tp_size: int,
    decode_tp_size: int,
    is_mla: bool,
    prefill_cp_size: int = 1,
    decode_cp_size: int = 1,
    prefill_pp_size: int = 1,
    decode_pp_size: int = 1,
    pp_rank: int = 0,
    decode_dcp_size: int = 1,
    enable_kv_cache_sharding: bool = False,
    enable_dsa_cache_layer_split: bool = False,
    enable_all_cp_ranks_for_transfer: bool = False,
) -> PullTargets:
    """Find the prefill ranks from which a decode rank pulls, over TP, CP and PP of both servers.

    Tensor-parallel ranks are those of `decode_targets`. If they stripe the pages of a latent, each
    has its own pages, and all send. In a context-parallel group, all ranks send if they divide
    pages or layers, else only the first. In a pipeline, all stages send, or only the own stage if
    decode has as many stages.

    Parameters
    ----------
    engine_rank, prefill_tp_size, decode_tp_size, is_mla
        See `decode_targets`.
    prefill_cp_size, decode_cp_size : int, optional
        Sizes of the attention context-parallel groups; decode's must be 1.
    prefill_pp_size, decode_pp_size : int, optional
        Pipeline stages; decode has one, or as many as prefill.
    pp_rank : int, optional
        Stage of the decode rank.
    decode_dcp_size : int, optional
        Size of decode context parallelism, which excludes context parallelism and striped pages of
        prefill.
    enable_kv_cache_sharding, enable_dsa_cache_layer_split : bool, optional
        Flags of prefill: whether ranks stripe its pages, or divide its layers.
    enable_all_cp_ranks_for_transfer : bool, optional
        Flag of decode: whether it always pulls from all context-parallel ranks.

    Returns
    -------
    PullTargets

    Raises
    ------
    TypeError
        If a number is no integer, or a flag no bool.
    ValueError
        If a rank or size is out of range, neither tensor-parallel size divides the other, the sizes
        differ while a latent is striped over them, or no mapping exists.

    Examples
    --------
    A latent whose pages two ranks stripe:

    >>> pull_targets(1, prefill_tp_size=2, decode_tp_size=2, is_mla=True,
    ...              enable_kv_cache_sharding=True)[:2]
    (None, [0, 1])
    """
    function = "pull_targets"
    prefill_cp = at_least(1, prefill_cp_size, function, "prefill_cp_size")
    decode_cp = at_least(1, decode_cp_size, function, "decode_cp_size")
    prefill_pp = at_least(1, prefill_pp_size, function, "prefill_pp_size")
    decode_pp = at_least(1, decode_pp_size, function, "decode_pp_size")
    dcp_size = at_least(1, decode_dcp_size, function, "decode_dcp_size")
    stage = at_least(0, pp_rank, function, "pp_rank")
    is_mla = flag(is_mla, function, "is_mla")
    sharded = flag(enable_kv_cache_sharding, function, "enable_kv_cache_sharding")
    layer_split = flag(enable_dsa_cache_layer_split, function, "enable_dsa_cache_layer_split")
    all_ranks = flag(enable_all_cp_ranks_for_transfer, function, "enable_all_cp_ranks_for_transfer")
    engine_rank = at_least(0, engine_rank, function, "engine_rank")
    prefill_tp = at_least(1, prefill_tp_size, function, "prefill_tp_size")
    decode_tp = at_least(1, decode_tp_size, function, "decode_tp_size")

    def require(ok: bool, rule: str) -> None:
        if not ok:
            raise ValueError(f"{function}: {rule}")

    require(
        prefill_tp % decode_tp == 0 or decode_tp % prefill_tp == 0,
        f"one of prefill_tp_size and decode_tp_size must divide the other, got {prefill_tp} and "
        f"{decode_tp}",
    )
    require(decode_cp == 1, f"decode_cp_size must be 1, got {decode_cp}")
    require(
        decode_pp in (1, prefill_pp),
        f"decode_pp_size must be 1 or prefill_pp_size {prefill_pp}, got {decode_pp}",
    )
    require(stage < decode_pp, f"pp_rank must be in [0, {decode_pp}), got {stage}")
    require(
        dcp_size == 1 or prefill_cp == 1,
        f"prefill_cp_size must be 1 with decode_dcp_size {dcp_size}, got {prefill_cp}",
    )
    require(
        dcp_size == 1 or not sharded,
        f"enable_kv_cache_sharding must be False with decode_dcp_size {dcp_size}, got True",
    )
    stripes_latent = is_mla and sharded and prefill_cp == 1
    require(
        not stripes_latent or prefill_tp == decode_tp,
        f"decode_tp_size must be prefill_tp_size {prefill_tp} where its ranks stripe a latent, "
        f"got {decode_tp}",
    )
    tp = decode_targets(
        engine_rank, prefill_tp_size=prefill_tp, decode_tp_size=decode_tp, is_mla=is_mla
    )
    target: int | None = tp.ranks.start
    tp_ranks = [*tp.ranks, *tp.dummy_ranks]
    num_waiting, num_answers = tp.required_dst_info_num, len(tp.ranks)
    if stripes_latent:
        target, tp_ranks = None, list(range(prefill_tp))
        num_waiting, num_answers = decode_tp, prefill_tp
    pulls_all = prefill_cp == 1 or sharded or layer_split or all_ranks
    cp_ranks = list(range(prefill_cp if pulls_all else 1))
    pp_ranks = [stage] if prefill_pp == decode_pp else list(range(prefill_pp))
    num_answers *= len(cp_ranks) * len(pp_ranks)
    return PullTargets(target, tp_ranks, cp_ranks, pp_ranks, num_waiting, num_answers)
