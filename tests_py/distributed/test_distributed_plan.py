# SPDX-License-Identifier: Apache-2.0
"""ContextParallel plans rightly, and refuses wrong arguments, in a world of one rank."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cpattn
from cpattn.distributed import ContextParallel
from cpattn.distributed.plans.plan import make_plan
from cpattn.kv import MHATokenToKVPool
from support.cases import assert_attention, dense, packed
from support.distributed.planning import first_of, plan_of

TABLES = np.array([[5, 3, 9], [2, 7, 0]])  # page_size 4: 9 and 6 tokens use 3 and 2 pages
LENS = ([4, 6], [9, 6])


@pytest.fixture(scope="module")
def cp(world):
    return ContextParallel(world, page_size=4)


def test_slots_are_where_the_block_tables_have_the_tokens(cp):
    plan = cp.plan(*LENS, block_tables=TABLES)
    assert plan.slots.tolist() == [13, 14, 15, 36, 8, 9, 10, 11, 28, 29]
    assert plan.block_tables.tolist() == [[5, 3, 9], [2, 7, -1]]
    assert plan.rows_per_rank == (10,)
    with pytest.raises(ValueError, match="read-only"):
        plan.slots[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        plan.block_tables[0, 0] = 1
    slots = [*plan.slots.tolist(), 0, 0]  # padding tokens share a row
    padded = cp.plan(*LENS, block_tables=TABLES, num_tokens=12, out_cache_loc=slots)
    assert sorted(padded.own_slots) == sorted([*slots[:10], -1, 0])
    pages, tables = cp.plan(*LENS, block_tables=[[0, 3, 9], [2, 7, -1]]).pages_in_order
    assert pages.tolist() == [0, 2, 3, 7, 9]
    assert tables.tolist() == [[0, 2, 4], [1, 3, -1]]


def test_plans_are_equal_if_their_tokens_pages_and_slots_are(cp):
    plan = cp.plan(*LENS, block_tables=TABLES)
    unused = TABLES.copy()
    unused[1, 2] = 99
    assert plan == cp.plan(*LENS, block_tables=unused)
    assert plan != cp.plan(*LENS, block_tables=TABLES + 1)
    assert plan != cp.plan(*LENS, block_tables=TABLES, num_tokens=11)
    assert plan != cp.plan(*LENS, block_tables=TABLES, out_cache_loc=[-1] * 10)


def test_pairs_are_counted_up_to_each_tokens_own_key(cp):
    for padding in (0, 3):
        plan = cp.plan(*LENS, block_tables=TABLES, num_tokens=10 + padding)
        assert plan.num_pairs == 6 + 7 + 8 + 9 + 1 + 2 + 3 + 4 + 5 + 6


def test_a_pool_must_have_the_last_row_of_a_shard():
    batch = first_of(2, 4).plan(*LENS, block_tables=TABLES).batch
    for rank, rows in ((0, 8), (1, 20)):  # pages 2, and 5, 3, 9 and 7
        batch.check_pool("attend", rank, rows)
        rule = f"^ContextParallel.attend: the shard of rank {rank} must have the {rows} rows "
        with pytest.raises(ValueError, match=rule):
            batch.check_pool("attend", rank, rows - 1)


def test_out_receives_the_result(cp):
    plan = cp.plan(*LENS, block_tables=TABLES)
    k_cache, v_cache = torch.randn(2, 40, 1, 16)
    q = torch.randn(10, 2, 16)
    out = torch.empty(10, 2, 16)
    result = cp.attend(plan, q, k_cache, v_cache, scale=0.5, out=out)
    assert result.data_ptr() == out.data_ptr()
    assert torch.equal(out, cp.attend(plan, q, k_cache, v_cache, scale=0.5))
    assert not torch.equal(out, cp.attend(plan, q, k_cache, v_cache))
    wide = torch.empty(20, 2, 16)[::2]  # gaps between rows
    assert torch.equal(cp.attend(plan, q, k_cache, v_cache, scale=0.5, out=wide), out)
    assert torch.equal(wide, out)


@pytest.mark.parametrize("use_fia", [False, True])
def test_a_pool_of_either_layout_is_written_and_read(cp, use_fia):
    pool = MHATokenToKVPool(
        size=40, page_size=4, num_layers=3, num_kv_heads=2, head_dim=16, dtype="float32",
        start_layer=7, use_fia=use_fia,
    )  # fmt: skip
    caches = pool.get_key_buffer(8), pool.get_value_buffer(8)
    for buffer in caches:
        buffer.fill_(torch.nan)
    lens, tables = [14, 6], np.array([[5, 2, 7, 1], [3, 6, -1, -1]], np.int32)
    plan = cp.plan(lens, block_tables=tables)
    k, v, q = torch.randn(3, 20, 2, 16, generator=torch.Generator().manual_seed(1))
    cp.write_kv(plan, *(cp.shard(plan, x) for x in (k, v)), *caches)
    out = cp.gather(plan, cp.attend(plan, cp.shard(plan, q), *caches))
    k_cache, v_cache = (cache.reshape(-1, 4, 2, 16) for cache in caches)
    assert torch.equal(k_cache.flatten(0, 1)[plan.slots.tolist()], k)
    assert torch.count_nonzero(k_cache.isnan()) == (44 - 20) * 2 * 16
    inputs = {"q_lens": lens, "kv_lens": lens, "block_tables": tables}
    assert_attention(out, None, {"q": q, "k_cache": k_cache, "v_cache": v_cache, **inputs})


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=6),
    st.integers(1, 9),
    st.sampled_from(["zigzag", "interleave", "contiguous"]),
    st.integers(0, 7),
)
def test_gathered_rows_of_all_ranks_agree_and_restore_the_token_order(
    lens, cp_size, strategy, padding
):
    extends = [n for n, _ in lens]
    tables = np.arange(len(lens) * 80).reshape(len(lens), 80)
    plans = [
        make_plan(
            metadata, extends, block_tables=tables, out_cache_loc=None, page_size=1,
            pad_to_physical=False,
        )
        for metadata in cpattn.build_cp_metadata_all_ranks(
            extends, [n + p for n, p in lens], cp_size=cp_size, strategy=strategy,
            num_tokens=sum(extends) + padding,
        )
    ]  # fmt: skip
    for plan in plans:
        assert plan.terms == plans[0].terms
        assert plan.rows_per_rank == plans[0].rows_per_rank
    rows = np.concatenate([plan.metadata.local_q_indices for plan in plans])
    np.testing.assert_array_equal(rows[plans[0].gathered_rows], np.arange(plans[0].num_tokens))
    queries = [*extends[:-1], extends[-1] + padding]
    request = np.repeat(np.arange(len(lens)), queries)[rows]
    position = np.concatenate([p + np.arange(n) for n, (_, p) in zip(queries, lens, strict=True)])
    ends = np.cumsum(plans[0].rows_per_rank)
    for plan in plans:
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            part = plan.tokens.rows_in(slice(begin, end))
            np.testing.assert_array_equal(part.request, request[begin:end])
            np.testing.assert_array_equal(part.position, position[rows][begin:end])


BITS, BYTES = np.ones(72, bool), np.ones(10, np.uint8)
VALUES = [
    ({"block_tables": TABLES[:, :2]}, r"\[2, >= 3\], got shape \[2, 2\]"),
    ({"block_tables": TABLES[0]}, "block_tables must have 2 dimensions"),
    ({"block_tables": [[5, 3, 9], [2, 9, 0]]}, "got row 36 for tokens 3 and 8"),
    ({"out_cache_loc": [0] * 9}, "out_cache_loc must have 10 entries"),
    ({"num_tokens": 9}, "num_tokens"),
    ({"seq_lens": [3, 6]}, "seq_lens"),
    ({"custom_mask": BITS, "packed_custom_mask": BYTES}, "either custom_mask or packed_custom_mas"),
    ({"custom_mask": np.ones(72)}, "custom_mask must be bool, got float64"),
    ({"custom_mask": BITS[1:]}, r"must have sum\(q_len \* kv_len\) = 72 elements, got 71"),
    ({"packed_custom_mask": BYTES[1:]}, r"sum\(ceil\(q_len \* kv_len / 8\)\) = 10 bytes, got 9"),
    ({"packed_custom_mask": BITS[:10]}, "packed_custom_mask must be uint8, got bool"),
]
ONE = {"extend_lens": [4], "seq_lens": [9], "block_tables": [[5, 3, 9]]}
TYPES = [
    ({"block_tables": TABLES * 1.0}, "block_tables must be integers, got float64"),
    (ONE | {"out_cache_loc": np.zeros((1, 1))}, "out_cache_loc must be integers, got float64"),
    ({"out_cache_loc": [True] * 10}, "out_cache_loc must be integers, got bool"),
    ({"custom_mask": [True] * 72}, "custom_mask must be a tensor"),
]


@pytest.mark.parametrize(
    ("changes", "message", "error"),
    [*((*row, ValueError) for row in VALUES), *((*row, TypeError) for row in TYPES)],
)
def test_plan_refuses(cp, changes, message, error):
    arguments = {"extend_lens": LENS[0], "seq_lens": LENS[1], "block_tables": TABLES}
    with pytest.raises(error, match=message) as raised:
        cp.plan(**(arguments | changes))
    assert str(raised.value).startswith(("ContextParallel.plan: ", "build_cp_metadata"))


def masks():
    rng = np.random.default_rng(0)
    return [rng.random(shape) < 0.5 for shape in [(4, 9), (6, 6)]]


@pytest.mark.parametrize("container", [np.asarray, torch.from_numpy])
def test_a_plan_keeps_its_mask_as_bits_of_its_own(cp, container):
    mask = container(dense(masks()))
    plan = cp.plan(*LENS, block_tables=TABLES, custom_mask=mask)
    assert plan.packed_custom_mask.tolist() == packed(masks()).tolist()
    assert plan == cp.plan(
        *LENS, block_tables=TABLES, packed_custom_mask=container(packed(masks()))
    )
    mask[:] = True
    assert plan.packed_custom_mask.tolist() == packed(masks()).tolist()
    with pytest.raises(ValueError, match="read-only"):
        plan.packed_custom_mask[0] = 1
    assert plan != cp.plan(*LENS, block_tables=TABLES, custom_mask=mask)
    assert plan != cp.plan(*LENS, block_tables=TABLES)
    assert cp.plan(*LENS, block_tables=TABLES).packed_custom_mask is None


def test_padding_tokens_see_nothing_and_are_not_seen(cp):
    padded = [masks()[0], np.pad(masks()[1], ((0, 3), (0, 3)))]
    for mask in ({"custom_mask": dense(masks())}, {"packed_custom_mask": packed(masks())}):
        plan = cp.plan(*LENS, block_tables=TABLES, num_tokens=13, **mask)
        assert plan.packed_custom_mask.tolist() == packed(padded).tolist()
        assert plan.num_padding_tokens == 3


def test_plans_of_others_are_refused(cp):
    with pytest.raises(TypeError, match="group must be a ProcessGroup or a DeviceMesh, got None"):
        ContextParallel(None, page_size=4)
    with pytest.raises(ValueError, match="strategy"):
        ContextParallel(cp.group, strategy="zigzig", page_size=4).plan([1], block_tables=[[0]])
    stranger = make_plan(
        cpattn.build_cp_metadata(*LENS, cp_rank=1, cp_size=2), LENS[0], block_tables=TABLES,
        out_cache_loc=None, page_size=4, pad_to_physical=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match="plan must be of rank 0 of 1, got rank 1 of 2"):
        cp.gather(stranger, torch.zeros(10, 4))
    sharded = plan_of(first_of(2, 4), 10, 0)
    with pytest.raises(ValueError, match="write_kv: plan must be of rank 0 of 1, got rank 0 of 2"):
        cp.write_kv(sharded, torch.zeros(10, 1, 8), None, torch.zeros(12, 1, 8), None)
