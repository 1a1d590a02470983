# SPDX-License-Identifier: Apache-2.0
"""What sharded pools refuse, what ranks that disagree are told, and which exchange is chosen."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from cpattn.distributed import ContextParallel, DecodePlan, ShardedPlan
from cpattn.distributed.sparse.choice import SparseSizes, choose_sparse
from cpattn.distributed.sparse.inputs import SparseInputs
from support.distributed import sharded_faults as worker
from support.distributed.distributed_worker import run_world
from support.distributed.sharded_worker import PLACEMENTS

TABLES = [[5, 3, 9], [2, 7, 0]]
LENS = ([4, 6], [9, 6])
EXCHANGES = ("pass_q", "gather", "ring", "all_to_all")


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(minutes=1))
    yield
    dist.destroy_process_group()


def make_cp(**options):
    placement = PLACEMENTS["pages"](1, 4)
    return ContextParallel(dist.group.WORLD, page_size=4, **{"placement": placement} | options)


def tensors():
    return [torch.randn(10, 4, 32), torch.randn(40, 2, 32), torch.randn(40, 2, 32)]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"exchange": "pass_kv"}, ValueError, "exchange must be one of auto, pass_q, gather, ring"),
        ({"placement": 4}, TypeError, "placement must have shard_size, owner_of, local_index, got"),
        (
            {"placement": PLACEMENTS["pages"](2, 4)},
            ValueError,
            "placement must be over the 1 ranks of the group, got shard_size 2",
        ),
        (
            {"placement": PLACEMENTS["pages"](1, 8)},
            ValueError,
            "placement must have the page_size 4, got 8",
        ),
        ({"max_scratch_bytes": 0}, ValueError, "max_scratch_bytes must be >= 1, got 0"),
    ],
)
def test_constructor_refuses(options, error, message):
    with pytest.raises(error, match=f"^ContextParallel: {message}"):
        make_cp(**options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(9, 4, 32)}, "q_local must have at least the 10 rows of rank 0, got 9"),
        ({"q": torch.zeros(10, 128)}, r"q must be \[num_rows, num_heads, dim\], got shape"),
        ({"k": torch.zeros(32, 2, 32)}, "the shard of rank 0 must have the 40 rows"),
        ({"k": torch.zeros(40, 64)}, r"k_shard must be contiguous, \[num_slots, num_kv_heads"),
        ({"v": None}, "v_head_dim must be given without v_shard, from 1 to the 32 elements"),
        ({"out": torch.zeros(10, 4, 16)}, r"out must be \[10, 4, 32\] of torch.float32, got"),
        ({"k_rope": torch.zeros(40, 2, 16)}, "q_rope and k_rope must be given together"),
        (
            {"q_rope": torch.zeros(10, 4, 32), "k_rope": torch.zeros(40, 2, 16)},
            r"q_rope must be \[10, 4, 16\] of torch.float32, as queries and k_rope are, got",
        ),
        (
            {"q_rope": torch.zeros(10, 4, 16), "k_rope": torch.zeros(32, 2, 16)},
            "the shard of rank 0 must have the 40 rows",
        ),
    ],
)
def test_attend_refuses(changes, message):
    cp = make_cp(exchange="pass_q")
    q, k, v = tensors()
    arguments = {"q": q, "k": k, "v": v} | changes
    with pytest.raises(ValueError, match=f"^ContextParallel.attend: {message}"):
        cp.attend(
            cp.plan(*LENS, block_tables=TABLES), arguments.pop("q"), arguments.pop("k"),
            arguments.pop("v"), **arguments,
        )  # fmt: skip


def test_what_the_core_refuses_is_refused_before_rows_travel():
    cp = make_cp()
    plan = cp.plan(*LENS, block_tables=TABLES)
    with pytest.raises(ValueError, match="paged_attention: window"):
        cp.attend(plan, *tensors(), window=-1)
    q, k, v = tensors()
    with pytest.raises(ValueError, match="paged_attention: k_cache must be bfloat16"):
        cp.attend(plan, q.bfloat16(), k, v)
    with pytest.raises(ValueError, match="paged_attention: sinks"):
        cp.attend(plan, q, k, v, sinks=torch.zeros(3))


def test_padding_tokens_are_no_keys_for_others():
    cp = make_cp()
    plan = cp.plan(*LENS, block_tables=TABLES, num_tokens=12)
    q = torch.zeros(12, 4, 32)
    with pytest.raises(ValueError, match=r"causal=False needs a mask, or a plan without padding"):
        cp.attend(plan, q, *tensors()[1:], causal=False)


@pytest.mark.parametrize("exchange", ["gather", "ring", "all_to_all"])
def test_scales_of_tokens_are_read_where_they_are(exchange):
    cp = make_cp(exchange=exchange)
    plan = cp.plan(*LENS, block_tables=TABLES)
    codes = torch.zeros(40, 2, 32, dtype=torch.int8)
    scales = torch.ones(40, 2)
    with pytest.raises(ValueError, match="of each token need the exchange pass_q, got"):
        cp.attend(plan, tensors()[0], codes, codes, k_scale=scales, v_scale=scales)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_rows_without_keys_are_zero_behind_a_sink_without_weight(exchange):
    cp = make_cp(exchange=exchange)
    nothing = torch.zeros(4 * 9 + 6 * 6, dtype=torch.bool)
    sinks = torch.tensor([-torch.inf, 0.0, torch.inf, 1.0])
    plan = cp.plan(*LENS, block_tables=TABLES, custom_mask=nothing)
    assert not cp.attend(plan, *tensors(), sinks=sinks).count_nonzero()
    step = cp.plan_decode([9, 6], block_tables=TABLES, custom_mask=nothing[:15])
    q, k, v = tensors()
    assert not cp.decode(step, q[:2], k, v, sinks=sinks).count_nonzero()


def test_decode_refuses():
    cp = make_cp()
    plan = cp.plan_decode([9, 6], block_tables=TABLES)
    q, k, v = tensors()
    with pytest.raises(ValueError, match="decode: q must have the 2 rows of the plan, got 10"):
        cp.decode(plan, q, k, v)
    with pytest.raises(
        TypeError, match=r"decode: plan must be one of ContextParallel\.plan_decode"
    ):
        cp.decode(cp.plan(*LENS, block_tables=TABLES), q, k, v)
    with pytest.raises(ValueError, match="decode: the shard of rank 0 must have the 40 rows"):
        cp.decode(plan, q[:2], k[:36], v[:36])
    with pytest.raises(TypeError, match="decode: return_lse must be a bool"):
        cp.decode(plan, q[:2], k, v, return_lse=1)


def test_a_decoded_result_outlives_the_next_step():
    """Partial results arrive in a buffer that is kept; what is returned must not lie in it."""
    cp = make_cp()
    plan = cp.plan_decode([9, 6], block_tables=TABLES)
    q, k, v = tensors()
    first, lse = cp.decode(plan, q[:2], k, v, return_lse=True)
    kept = first.clone(), lse.clone()
    assert first.is_contiguous()
    assert not torch.equal(cp.decode(plan, q[2:4], k, v), first)
    assert torch.equal(first, kept[0])
    assert torch.equal(lse, kept[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_lens": [9, 6], "q_lens": [1]}, "must have an entry for each request, and one at"),
        ({"kv_lens": []}, "must have an entry for each request, and one at least, got 0 and 0"),
        ({"kv_lens": [9, 6], "q_lens": [1, 7]}, r"got q_lens\[1\] = 7 for kv_lens\[1\] = 6"),
        ({"kv_lens": [9, 60]}, r"block_tables must be \[bs, >= ceil"),
        ({"kv_lens": [9, 9], "block_tables": [[1, 2, 3], [4, 5, 3]]}, "got row 12 for tokens 0"),
    ],
)
def test_plan_decode_refuses(arguments, message):
    with pytest.raises(ValueError, match=f"^ContextParallel.plan_decode: .*{message}"):
        make_cp().plan_decode(**{"block_tables": TABLES} | arguments)


def test_replicated_pools_have_no_decode_step():
    with pytest.raises(ValueError, match="plan_decode: needs a placement"):
        make_cp(placement=None).plan_decode([9, 6], block_tables=TABLES)


@pytest.mark.parametrize("missing", ["v_local", "v_shard"])
def test_values_come_with_their_shard(missing):
    cp = make_cp()
    plan = cp.plan(*LENS, block_tables=TABLES)
    rows, shard = torch.ones(10, 2, 32), torch.zeros(40, 2, 32)
    values = (None, shard) if missing == "v_local" else (rows, None)
    with pytest.raises(ValueError, match=f"v_local and v_shard must .* got no {missing}"):
        cp.write_kv(plan, rows, values[0], shard, values[1])
    assert not shard.any()


def test_kinds_of_plans():
    cp = make_cp()
    plan = cp.plan(*LENS, block_tables=TABLES)
    assert isinstance(plan, ShardedPlan)
    assert plan == cp.plan(*LENS, block_tables=TABLES)
    assert plan != make_cp(exchange="ring").plan(*LENS, block_tables=TABLES)
    assert plan.kv_counts == (15,)
    step = cp.plan_decode([9, 6], block_tables=TABLES, q_lens=[1, 2])
    assert isinstance(step, DecodePlan)
    assert step.slots.tolist() == [36, 28, 29]
    assert step.num_tokens == 3
    assert not isinstance(make_cp(placement=None).plan(*LENS, block_tables=TABLES), ShardedPlan)


class Elsewhere:
    """A rank of four without a group, which planning needs none of."""

    @staticmethod
    def plan(extend, prefix, *, max_scratch_bytes=1 << 30):
        cp = object.__new__(ContextParallel)
        cp.cp_rank, cp.cp_size, cp.strategy, cp.page_size = 0, 4, "zigzag", 16
        cp.placement, cp.exchange = PLACEMENTS["pages"](4, 16), "auto"
        cp.max_scratch_bytes = max_scratch_bytes
        pages = -(-(extend + prefix) // 16)
        return cp, cp.plan([extend], [extend + prefix], block_tables=[range(pages)])


GQA = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
MLA = {
    "num_heads": 16, "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "shares_values": True
}  # fmt: skip


@pytest.mark.parametrize(
    ("extend", "prefix", "layer", "expected"),
    [
        (64, 16000, GQA, "pass_q"),
        (4096, 0, GQA, "gather"),
        (4096, 16000, GQA, "all_to_all"),
        (4096, 8000, GQA | {"num_heads": 30, "num_kv_heads": 6}, "gather"),
        (4096, 0, MLA, "gather"),
        (16, 16000, MLA, "pass_q"),
    ],
)
def test_auto_is_the_exchange_of_the_fewest_bytes(extend, prefix, layer, expected):
    cp, plan = Elsewhere.plan(extend, prefix)
    choice = cp.choose_exchange(plan, **layer)
    assert choice.exchange == expected
    eligible = {name for name in choice.received_bytes if name in choice.reason} - {"pass_q"}
    assert f"at most {choice.received_bytes[expected]} bytes" in choice.reason
    assert all(choice.received_bytes[expected] <= choice.received_bytes[e] for e in eligible)


def test_bytes_of_an_exchange_are_those_of_its_rows():
    cp, plan = Elsewhere.plan(64, 192)
    received = cp.choose_exchange(plan, **GQA).received_bytes
    key, query, result = 2 * 128 * 2, 128 * 2, 128 * 2
    assert plan.kv_counts == (64,) * 4
    assert received["gather"] == received["ring"] == 192 * 8 * key
    assert received["pass_q"] == 48 * 32 * query + 3 * 16 * 32 * (result + 4)  # with the LSE
    assert received["all_to_all"] == 48 * 8 * query + 192 * 2 * key + 16 * 24 * result


def test_merging_counts_as_bytes():
    """Queries and results of 4,096 new tokens are fewer bytes than 80,000 keys by heads."""
    cp, plan = Elsewhere.plan(4096, 76000)
    choice = cp.choose_exchange(plan, **GQA)
    received = choice.received_bytes
    merged = 4 * (4096 // 4) * 32 * 128
    assert f"merging counts as bytes, too: pass_q {3 * merged}" in choice.reason
    assert received["pass_q"] < received["all_to_all"] < received["pass_q"] + 3 * merged
    assert choice.exchange == "all_to_all"


def test_a_ring_takes_over_where_no_head_fits():
    uneven = GQA | {"num_heads": 30, "num_kv_heads": 6}
    cp, plan = Elsewhere.plan(4096, 0, max_scratch_bytes=1 << 20)
    choice = cp.choose_exchange(plan, **uneven)
    assert choice.exchange == "ring"
    assert "more than max_scratch_bytes" in choice.reason


def test_choose_exchange_refuses():
    cp = make_cp()
    plan = cp.plan(*LENS, block_tables=TABLES)
    with pytest.raises(ValueError, match="num_heads must be a multiple of num_kv_heads, got 3"):
        cp.choose_exchange(plan, num_heads=3, num_kv_heads=2, head_dim=16)
    with pytest.raises(ValueError, match="head_dim must be >= 1, got 0"):
        cp.choose_exchange(plan, num_heads=4, num_kv_heads=2, head_dim=0)
    replicated = make_cp(placement=None).plan(*LENS, block_tables=TABLES)
    with pytest.raises(ValueError, match="plan must be of sharded pools"):
        cp.choose_exchange(replicated, num_heads=4, num_kv_heads=2, head_dim=16)


@pytest.mark.parametrize(
    ("extend", "prefix", "num_heads", "max_scratch_bytes", "expected"),
    [
        (4096, 0, 128, 1 << 30, "gather"),
        (16, 100_000, 16, 1 << 30, "pass_q"),
        (4096, 16000, 128, 1 << 30, "gather"),
        (4096, 16000, 128, 1 << 20, "pass_q"),  # where the index keys do not fit
    ],
)
def test_auto_of_sparse_attention(extend, prefix, num_heads, max_scratch_bytes, expected):
    cp, plan = Elsewhere.plan(extend, prefix, max_scratch_bytes=max_scratch_bytes)
    q = torch.empty(1, num_heads, 576, dtype=torch.bfloat16)
    kv = torch.empty(16, 1, 656, dtype=torch.uint8)
    index_q = torch.empty(1, 64, 128, dtype=torch.float8_e4m3fn)
    index_k = torch.empty(1, 16 * 132, dtype=torch.uint8)
    inputs = SparseInputs(
        q, kv, index_q, index_k, torch.empty(1, 64), None, page_size=16, topk=2048, sm_scale=1.0,
        d_v=512, attn_sink=None,
    )  # fmt: skip
    choice = cp.choose_sparse_exchange(
        plan, topk=2048, num_heads=num_heads, num_index_heads=64, index_element_bytes=1,
        latent_bytes=656, index_key_bytes=132,
    )  # fmt: skip
    assert choice == choose_sparse(plan, SparseSizes.of_inputs(inputs))
    assert choice.exchange == expected
    assert str(choice.received_bytes[expected]) in choice.reason
    assert ("max_scratch_bytes" in choice.reason) == (max_scratch_bytes == 1 << 20)


def test_choose_sparse_exchange_refuses():
    layer = {"topk": 64, "num_heads": 16, "num_index_heads": 4}
    cp = make_cp()
    plan = cp.plan(*LENS, block_tables=TABLES)
    unscaled = cp.choose_sparse_exchange(plan, **layer)
    assert unscaled == cp.choose_sparse_exchange(
        plan, **layer, latent_bytes=576 * 2, index_key_bytes=128 * 2
    )
    with pytest.raises(ValueError, match="choose_sparse_exchange: topk must be >= 1, got 0"):
        cp.choose_sparse_exchange(plan, **layer | {"topk": 0})
    with pytest.raises(TypeError, match="num_heads must be an integer"):
        cp.choose_sparse_exchange(plan, **layer | {"num_heads": 1.0})
    step = cp.plan_decode([9, 6], block_tables=TABLES, q_lens=[1, 2])
    replicated = make_cp(placement=None).plan(*LENS, block_tables=TABLES)
    for other in (step, replicated):
        with pytest.raises(ValueError, match="plan must be of new tokens over sharded pools"):
            cp.choose_sparse_exchange(other, **layer)


@pytest.fixture(scope="module")
def disagreements(tmp_path_factory):
    return run_world(3, tmp_path_factory.mktemp("disagreements"), worker.run_disagreements)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "term"),
    [
        ("placement", "write_kv: placement"),
        ("placement of attend", "attend: placement"),
        ("replicated", "write_kv: placement"),
        ("exchange", "attend: exchange"),
        ("max_scratch_bytes", "attend: exchange"),
        ("window", "attend: options"),
        ("scale", "attend: options"),
        ("sinks", "attend: options"),
        ("LSE by heads", "attend: options"),
        *((f"scales by {name}", "attend: options") for name in ("gather", "ring", "all_to_all")),
        ("scales of tokens", "attend: options"),
        ("topk", "attend_sparse: options"),
        ("sink", "attend_sparse: options"),
        ("kv_lens", "decode: lengths"),
        ("softcap of decode", "decode: options"),
        ("call", ": call"),
    ],
)
def test_disagreement_is_told_to_all_ranks_before_rows_are_sent(disagreements, what, term):
    for told, _ in disagreements:
        assert told[what].startswith("RuntimeError: ContextParallel.")
        assert f"{term} of rank 1 differs from rank 0" in told[what]
        assert told[what].endswith("; nothing was sent")


@pytest.mark.slow
def test_refused_arguments_of_one_rank_are_told_to_all(disagreements):
    for rank, (told, _) in enumerate(disagreements):
        if rank == worker.ODD_RANK:
            assert "ValueError: ContextParallel.attend: the shard of rank 1" in told["small shard"]
        else:
            assert "rank 1 refused its arguments; nothing was sent" in told["small shard"]


@pytest.mark.slow
def test_group_stays_usable_after_disagreements(disagreements):
    assert all(written for _, written in disagreements)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_lost_rank_is_named(tmp_path, exchange):
    *others, _ = run_world(3, tmp_path, worker.run_loss, exchange, group_timeout=4)
    for message in others:
        assert message.startswith("ContextParallel.attend: ")
        assert "of 3 did not answer" in message
    assert any("rank 2 of 3" in message for message in others)


@pytest.mark.slow
def test_a_rank_that_ends_well_is_not_missed(tmp_path):
    """Its process has ended, but all has come that the others wait for."""
    assert run_world(4, tmp_path, worker.run_early_end) == [None, *["no error"] * 3]
