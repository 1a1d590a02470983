# SPDX-License-Identifier: Apache-2.0
"""`ContextParallel` chooses an exchange and its rounds of heads; a single rank has all keys."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from cpattn import _core
from cpattn.context_parallel import exchanges
from cpattn.distributed.layers import sharded_attend
from cpattn.distributed.layers.choice import choose_sparse, choose_state_exchange
from cpattn.distributed.sparse.inputs import SparseInputs
from cpattn_lab.cost_model import AttentionLayer, Rates, exchange_work, predict, predict_decode
from support.distributed.planning import first_of, one_rank, plan_of
from support.distributed.sharded_worker import EXCHANGES
from support.places import ROOT

TABLES = [[5, 3, 9], [2, 7, 0]]
LENS = ([4, 6], [9, 6])


def tensors():
    return [torch.randn(10, 4, 32), torch.randn(40, 2, 32), torch.randn(40, 2, 32)]


def test_every_exchange_of_the_table_runs_is_predicted_and_has_a_row_on_the_page():
    page = (ROOT / "docs" / "how_to" / "sharded_attention.md").read_text()
    assert sharded_attend.STRATEGIES.keys() == exchanges.EXCHANGES.keys()
    assert EXCHANGES == exchanges.ON_ALL_RANKS, "the exchanges that worlds of ranks try"
    for name, exchange in exchanges.EXCHANGES.items():
        assert f'| `"{name}"` |' in page
        mesh = (1, 2) if exchange.needs_mesh else None
        placed = {"cp_size": 2, "placement": "page_interleave", "mesh": mesh}
        assert exchange_work([8], [40], **placed, exchange=name).exchange == name


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_rows_without_keys_are_zero_behind_a_sink_without_weight(world, exchange):
    cp = one_rank(exchange=exchange)
    nothing = torch.zeros(4 * 9 + 6 * 6, dtype=torch.bool)
    sinks = torch.tensor([-torch.inf, 0.0, torch.inf, 1.0])
    plan = cp.plan(*LENS, block_tables=TABLES, custom_mask=nothing)
    assert not cp.attend(plan, *tensors(), sinks=sinks).count_nonzero()
    step = cp.plan_decode([9, 6], block_tables=TABLES, custom_mask=nothing[:15])
    q, k, v = tensors()
    assert not cp.decode(step, q[:2], k, v, sinks=sinks).count_nonzero()


def test_a_decoded_result_outlives_the_next_step(world):
    """Partial results arrive in a kept buffer, which returned results must not use."""
    cp = one_rank()
    plan = cp.plan_decode([9, 6], block_tables=TABLES)
    q, k, v = tensors()
    first, lse = cp.decode(plan, q[:2], k, v, return_lse=True)
    kept = first.clone(), lse.clone()
    assert first.is_contiguous()
    assert not torch.equal(cp.decode(plan, q[2:4], k, v), first)
    assert torch.equal(first, kept[0])
    assert torch.equal(lse, kept[1])


MLA = {
    "num_heads": 16, "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "shares_values": True
}  # fmt: skip


@pytest.mark.parametrize(
    ("extend", "prefix", "expected"), [(4096, 0, "gather"), (16, 16000, "pass_q")]
)
def test_auto_is_the_exchange_of_the_fewest_bytes(extend, prefix, expected):
    cp = first_of(4)
    choice = cp.choose_exchange(plan_of(cp, extend, prefix), **MLA)
    assert choice.exchange == expected
    assert f"at most {choice.received_bytes[expected]} bytes" in choice.reason
    assert choice.received_bytes[expected] == min(choice.received_bytes.values())


@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(0, 300)), min_size=1, max_size=3),
    st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1), (3, 2)]),
    st.sampled_from([(8, 2), (4, 4), (6, 3), (5, 1)]),
    st.none() | st.integers(0, 200),
)
def test_plans_and_predictions_count_and_choose_alike(lens, mesh, heads, window):
    """Pages are allocated as in the cost model: each sequence begins on the rank with fewest pages.

    Plans and model do not count keys that no query sees, except that a real ring passes all keys,
    which the model leaves out.
    """
    assume(any(new for new, _ in lens))
    extends = [new for new, _ in lens]
    seq_lens = [sum(pair) for pair in lens]
    size, page, used, tables = mesh[0] * mesh[1], 16, [0] * (mesh[0] * mesh[1]), []
    for length in seq_lens:
        base, table = used.index(min(used)), []
        for i in range(-(-length // page)):
            rank = (base + i) % size
            table.append(used[rank] * size + rank)
            used[rank] += 1
        tables.append(table)
    tables = [table + [-1] * (max(map(len, tables)) - len(table)) for table in tables]
    rows = np.arange(size).reshape(mesh)
    cp = first_of(size, page, mesh=tuple(map(tuple, rows.tolist())))
    plan = cp.plan(extends, seq_lens, block_tables=tables)
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": 32}
    choice = cp.choose_exchange(plan, **sizes, window=window, writes=True)
    layer = AttentionLayer(**sizes, page_size=page, window=window)
    all_seen = min(extends) > 0 and window is None
    ways = {"cp_size": size, "placement": "page_interleave", "mesh": mesh}
    for exchange, received in choice.received_bytes.items():
        work = exchange_work(
            extends, seq_lens, layer=layer, exchange=exchange, state_dtype="bfloat16", **ways
        )
        if all_seen or exchange not in ("ring", "usp"):
            assert work.received_bytes.max() == received, exchange
    rates = Rates(gflops=100)
    auto = predict([(extends, seq_lens)], layer, rates, exchange="auto", **ways)
    assert auto.exchange == choice.exchange


@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 40), st.sampled_from(["all", "own"]))
def test_steps_and_predictions_choose_alike(num_tokens, size, num_heads, out_heads):
    plan = SimpleNamespace(num_tokens=num_tokens, placement=SimpleNamespace(shard_size=size))
    moved = _core.LayerBytes(num_heads, 1, 128, 256, 128, 64)
    choice = choose_state_exchange(plan, moved, out_heads)
    layer = AttentionLayer(num_heads=num_heads, num_kv_heads=1, head_dim=64)
    ways = {"cp_size": size, "state_dtype": "bfloat16", "out_heads": out_heads}
    steps = {
        name: predict_decode([9] * num_tokens, layer, Rates(gflops=100), exchange=name, **ways)
        for name in ("auto", "gather", "all_to_all")
    }
    assert steps["auto"].exchange == choice.exchange
    for name, received in choice.received_bytes.items():
        assert steps[name].received_bytes.max() == received


def test_auto_of_sparse_attention():
    """Index keys do not fit into the scratch."""
    cp = first_of(4, max_scratch_bytes=1 << 20)
    plan = plan_of(cp, 4096, 16000)
    q = torch.empty(1, 128, 576, dtype=torch.bfloat16)
    kv = torch.empty(16, 1, 656, dtype=torch.uint8)
    index_q = torch.empty(1, 64, 128, dtype=torch.float8_e4m3fn)
    index_k = torch.empty(1, 16 * 132, dtype=torch.uint8)
    inputs = SparseInputs(
        q, kv, index_q, index_k, torch.empty(1, 64), None, page_size=16, topk=2048, sm_scale=1.0,
        d_v=512, attn_sink=None,
    )  # fmt: skip
    choice = cp.choose_sparse_exchange(
        plan, topk=2048, num_heads=128, num_index_heads=64, index_element_bytes=1,
        latent_bytes=656, index_key_bytes=132,
    )  # fmt: skip
    assert choice == choose_sparse(plan, inputs.sizes())
    assert choice.exchange == "pass_q"
    assert str(choice.received_bytes["pass_q"]) in choice.reason
    assert "max_scratch_bytes" in choice.reason
