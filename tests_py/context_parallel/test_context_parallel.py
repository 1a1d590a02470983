# SPDX-License-Identifier: Apache-2.0
"""Context-parallel metadata: published values, and shards by the engine's own recurrence."""

import numpy as np
import pytest

from bench.context_parallel import sglang_metadata
from cpattn import build_cp_metadata

STRATEGIES = ("zigzag", "interleave", "contiguous")
HALF_FIELDS = ("kv_len", "actual_seq_q", "cu_seqlens_q", "cu_seqlens_kv")


def test_golden_upstream_values():
    plan = build_cp_metadata([1024, 1024], cp_rank=0, cp_size=4)
    assert plan.split_list == [128] * 16
    assert plan.per_rank_actual_token == [512] * 4
    assert plan.zigzag_index == [0, 8, 7, 15]
    plan = build_cp_metadata([1010], cp_rank=0, cp_size=4)
    assert plan.split_list == [127, 127, *[126] * 6]
    assert plan.per_rank_actual_token[0] == 253


@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
def test_interleave_shards_like_the_carry_recurrence(cp_size):
    rng = np.random.default_rng(0)
    for extend in rng.integers(0, 12, size=(40, 6)).tolist():
        for rank in range(cp_size):
            plan = build_cp_metadata(extend, cp_rank=rank, cp_size=cp_size, strategy="interleave")
            expected = sglang_metadata.interleave_shard_per_request(
                extend, cp_rank=rank, cp_size=cp_size
            )
            q_list, _, bs_list, _ = plan.shard_per_request()
            assert (q_list, bs_list) == expected
            counts = np.bincount(plan.query_request_indices, minlength=len(extend))
            assert plan.rows_per_request() == counts.tolist()


@pytest.mark.parametrize(
    ("extend", "cp_size", "strategy", "logical", "physical"),
    [
        ([4038], 4, "zigzag", [1009, 1010, 1010, 1009], 1016),
        ([4040], 4, "interleave", [1010] * 4, 1012),
        ([16], 4, "zigzag", [4] * 4, 8),
        ([10], 3, "contiguous", [3, 3, 4], 6),
        ([0], 2, "zigzag", [0, 0], 0),
    ],
)
def test_physical_padding(extend, cp_size, strategy, logical, physical):
    plan = build_cp_metadata(extend, cp_rank=1, cp_size=cp_size, strategy=strategy)
    assert sorted(plan.per_rank_actual_token) == sorted(logical)
    assert plan.per_rank_logical_token is None
    padded = plan.pad_to_physical()
    assert padded.per_rank_logical_token == plan.per_rank_actual_token
    assert padded.per_rank_actual_token == padded.max_rank_len == [physical] * cp_size
    assert padded.local_q_indices.tolist() == plan.local_q_indices.tolist()


def test_compat_takes_what_engines_take():
    def build(*args, **kwargs):
        return build_cp_metadata(*args, cp_rank=0, cp_size=2, compat=True, **kwargs)

    assert build([8, 8], [20]).prefix_lens == [0, 0]
    assert build([8, 8], [5, 11]).prefix_lens == [0, 3]
    assert build(None, [8, 9]) == build([8, 9])
    assert build(None, [8], num_tokens=9) == build([8], num_tokens=9)
    assert build(None, [], num_tokens=9) == build(None, num_tokens=9) == build([9])


ALIASES = {"in-seq-split": "zigzag", "head_tail": "zigzag", "round-robin-split": "interleave"}


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_strategy_aliases(alias, name):
    plan = build_cp_metadata([20], cp_rank=1, cp_size=2, strategy=alias)
    assert plan.strategy == name
    assert plan == build_cp_metadata([20], cp_rank=1, cp_size=2, strategy=name)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_plan_is_a_value(strategy):
    def build(**changes):
        arguments = {"cp_rank": 1, "cp_size": 2, "strategy": strategy} | changes
        return build_cp_metadata([10, 14], [15, 14], **arguments)

    plan = build()
    assert plan == build()
    assert plan != build(cp_rank=0)
    assert plan != build(cp_size=3)
    assert plan != build(num_tokens=25)
    assert plan != build(kv_len_convention="bare")
    assert plan != "plan"


def test_repr_and_dict_show_the_plan():
    plan = build_cp_metadata([13], cp_rank=0, cp_size=2)
    assert repr(plan) == (
        "ContextParallelMetadata(strategy='zigzag', cp_rank=0, cp_size=2, bs=1, "
        "total_seq_lens=13, per_rank_actual_token=[7, 6], kv_len_convention='baked')"
    )
    fields = plan.to_dict()
    for name, value in fields.items():
        np.testing.assert_array_equal(getattr(plan, name), value)
    assert fields["split_list"] == [4, 3, 3, 3]
    assert fields["kv_len_prev_tensor"] == [4]


def test_arrays_cannot_be_written():
    plan = build_cp_metadata([13], cp_rank=0, cp_size=2)
    for array in (plan.kv_len_prev_tensor, plan.local_q_indices):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
    plan.split_list.append(1)  # the list belongs to the caller
    assert plan.split_list == [4, 3, 3, 3]
    with pytest.raises(AttributeError):
        plan.bs = 2


# Fields of all arrays of a plan, which are in one array for a copy to a device.
FIELDS = [
    f"{family}_{half}_tensor" for family in HALF_FIELDS for half in ("prev", "next", "combined")
]


@pytest.mark.parametrize("bs", [1, 3, 16, 40])
@pytest.mark.parametrize("alignment", [1, 4, 16])
def test_packed_tensors(bs, alignment):
    plan = build_cp_metadata([9] * bs, [9 + s for s in range(bs)], cp_rank=1, cp_size=3)
    packed, sizes = plan._packed_tensors(alignment)
    assert packed.dtype == np.int32
    assert packed.flags.writeable
    assert len(packed) == sum(sizes)
    ends = np.cumsum(sizes)
    step = 1 if alignment == 1 else 2
    assert not ((ends - sizes)[::step] % alignment).any()
    parts = np.split(packed, ends[:-1])[::step]
    for name, part in zip(FIELDS, parts, strict=True):
        np.testing.assert_array_equal(part, getattr(plan, name))
    packed[:] = -1  # it is a copy: the plan does not change
    assert plan.kv_len_prev_tensor.min() > 0


def test_packed_tensors_of_a_plan_without_them():
    for strategy in ("interleave", "contiguous"):
        plan = build_cp_metadata([9], cp_rank=0, cp_size=2, strategy=strategy)
        with pytest.raises(ValueError, match="_tensor exists for zigzag only"):
            plan._packed_tensors(1)
