# SPDX-License-Identifier: Apache-2.0
"""shard and unshard: NumPy and torch, every dimension, padding, wrong shapes; torch's own split."""

import ml_dtypes
import numpy as np
import pytest

from cpattn import build_cp_metadata, build_cp_metadata_all_ranks
from support.pairwise import pairwise

torch = pytest.importorskip("torch")
balancer = pytest.importorskip(
    "torch.distributed.tensor.experimental._context_parallel._load_balancer"
)

STRATEGIES = ("zigzag", "interleave", "contiguous")
EXTEND, SEQ, TOTAL = [10, 0, 14, 3], [15, 4, 14, 3], 27


def make_plans(strategy, physical=False):
    plans = build_cp_metadata_all_ranks(EXTEND, SEQ, cp_size=3, strategy=strategy)
    return [plan.pad_to_physical() for plan in plans] if physical else plans


def make_tokens(shape, dtype):
    values = np.arange(1, np.prod(shape) + 1).reshape(shape)
    return (
        torch.tensor(values).to(dtype) if isinstance(dtype, torch.dtype) else values.astype(dtype)
    )


SHAPES = [((TOTAL,), 0), ((TOTAL, 4), -2), ((2, TOTAL), -1), ((2, TOTAL, 3), 1)]
DTYPES = [np.float32, np.int64, ml_dtypes.bfloat16, torch.bfloat16, torch.float32, torch.int64]


@pytest.mark.parametrize(
    ("shape_and_dim", "dtype", "strategy", "physical"),
    pairwise(SHAPES, DTYPES, STRATEGIES, (False, True)),
)
def test_scenario_09_unshard_of_shard_is_the_identity(shape_and_dim, dtype, strategy, physical):
    shape, dim = shape_and_dim
    x = make_tokens(shape, dtype)
    plans = make_plans(strategy, physical)
    parts = [plan.shard(x, dim) for plan in plans]
    for plan, part in zip(plans, parts, strict=True):
        assert type(part) is type(x)
        assert part.dtype == x.dtype
        assert part.shape[dim] == plan.per_rank_actual_token[plan.cp_rank]
    whole = plans[0].unshard(parts, dim)
    assert type(whole) is type(x)
    assert whole.shape == x.shape
    assert (whole == x).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_shard_takes_the_local_rows_and_zeroes_the_padding(strategy):
    x = np.arange(1, 11)
    for plan in build_cp_metadata_all_ranks([4, 6], cp_size=4, strategy=strategy):
        plan = plan.pad_to_physical()
        local = plan.shard(x)
        rows = plan.per_rank_logical_token[plan.cp_rank]
        assert local[:rows].tolist() == x[plan.local_q_indices].tolist()
        assert local[rows:].tolist() == [0] * (len(local) - rows)
        assert len(local) > rows or strategy != "zigzag"


def test_scenario_21_22_tokens_padded_after_planning():
    """Rows beyond the plan are refused unless a call asks to cut them; their NaN has no effect."""
    plans = make_plans("zigzag")
    x = np.concatenate([np.arange(TOTAL, dtype=np.float32), np.full(5, np.nan, np.float32)])
    with pytest.raises(ValueError, match=r"shard: x must have total_seq_lens = 27 rows .* got 32"):
        plans[0].shard(x)
    parts = [plan.shard(x, truncate=True) for plan in plans]
    assert plans[0].unshard(parts).tolist() == x[:TOTAL].tolist()


def test_unshard_ignores_rows_beyond_the_logical_ones():
    plans = make_plans("zigzag")
    x = torch.arange(TOTAL, dtype=torch.float32)
    parts = [torch.cat([plan.shard(x), torch.full((3,), torch.nan)]) for plan in plans]
    assert torch.equal(plans[0].unshard(parts), x)


def test_shard_keeps_the_gradient():
    x = torch.ones(TOTAL, 2, requires_grad=True)
    plan = make_plans("zigzag", physical=True)[1]
    plan.shard(x).sum().backward()
    owned = np.zeros(TOTAL)
    owned[plan.local_q_indices] = 1
    assert x.grad[:, 0].tolist() == owned.tolist()


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_the_head_tail_balancer_of_torch_is_zigzag(size, chunk):
    """All blocks are equal, because the balancer takes only multiples of twice the ranks."""
    length = 2 * size * chunk
    theirs = balancer._HeadTailLoadBalancer(length, size, "cpu")._generate_indices()
    plans = build_cp_metadata_all_ranks([length], cp_size=size, strategy="head_tail")
    ours = np.concatenate([plan.local_q_indices for plan in plans])
    assert np.array_equal(ours, np.asarray(theirs).reshape(-1))


def test_shard_refuses_other_shapes():
    plan = build_cp_metadata([5], cp_rank=0, cp_size=2)
    with pytest.raises(ValueError, match=r"total_seq_lens = 5 rows along dim 1, got 4"):
        plan.shard(np.zeros((5, 4)), dim=1)
    with pytest.raises(ValueError, match=r"at least total_seq_lens = 5 rows along dim 0, got 4"):
        plan.shard(np.zeros(4), truncate=True)
    with pytest.raises(ValueError, match=r"shard: dim must be in \[-1, 1\), got 1"):
        plan.shard(np.zeros(5), dim=1)


def test_unshard_refuses_other_parts():
    plan = build_cp_metadata([5], cp_rank=0, cp_size=2)
    with pytest.raises(ValueError, match="unshard: parts must hold cp_size = 2 tensors, got 1"):
        plan.unshard([np.zeros(3)])
    rows = np.broadcast_to(np.float32(1), (2**40, 1))  # too many for a list
    with pytest.raises(
        ValueError, match="unshard: parts must hold cp_size = 2 tensors, got 109951"
    ):
        plan.unshard(rows)
    records = memoryview(np.zeros(2, [("a", "f4")]))
    with pytest.raises(TypeError, match=r"unshard: parts must be a sequence of tensors, got memor"):
        plan.unshard(records)
    with pytest.raises(ValueError, match=r"the part of rank 1 must have 1 dim.* 2 rows .* \(1,\)"):
        plan.unshard([np.zeros(3), np.zeros(1)])
    with pytest.raises(ValueError, match=r"the part of rank 1 must have 1 dim.* \(2, 1\)"):
        plan.unshard([np.zeros(3), np.zeros((2, 1))])
    with pytest.raises(ValueError, match=r"one shape but for dim 0, got \(2, 4\) of rank 1 beside"):
        plan.unshard([np.zeros((3, 1)), np.zeros((2, 4))])
    with pytest.raises(TypeError, match="all tensors of torch or none, got both"):
        plan.unshard([np.zeros(3), torch.zeros(2)])
    with pytest.raises(ValueError, match=r"unshard: dim must be in \[-1, 1\), got -2"):
        plan.unshard([np.zeros(3), np.zeros(2)], dim=-2)
