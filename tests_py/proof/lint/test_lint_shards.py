# SPDX-License-Identifier: Apache-2.0
"""Plans over pools that ranks share, and their selections of keys, are refuted if damaged."""

from dataclasses import replace

import numpy as np
import pytest
import torch.distributed as dist

from cpattn.distributed import ContextParallel
from cpattn.kv import PageInterleave, TokenInterleave
from cpattn_proof import NotUsable, lint, simulate
from cpattn_proof.linting.adapters.selections import from_topk
from cpattn_proof.linting.adapters.shards import (
    from_sharded_plans,
    from_sharded_topk,
    from_striped_writes,
)
from support.proof.plans import kinds

PAGE_SIZE = 4
EXTEND, TOTAL, Q_LENS = [13, 5, 9], [20, 9, 9], [1, 2, 1]
TABLES = [[2, 5, 3, 8, 9], [4, 7, 6, -1, -1], [13, 11, 12, -1, -1]]
NUM_PAGES = 14
PLACEMENTS = {
    "page_interleave": PageInterleave(shard_size=2, page_size=PAGE_SIZE),
    "token_interleave": TokenInterleave(shard_size=2, interleave=1),
    "token_interleave:2": TokenInterleave(shard_size=2, interleave=2),
}


def plans_of(placement, strategy="zigzag"):
    plans = {}

    def program():
        cp = ContextParallel(dist.group.WORLD, page_size=PAGE_SIZE, placement=PLACEMENTS[placement])
        if strategy == "decode":
            plan = cp.plan_decode(TOTAL, q_lens=Q_LENS, block_tables=TABLES)
        else:
            plan = cp.plan(EXTEND, TOTAL, block_tables=TABLES)
        plans[dist.get_rank()] = plan
        dist.barrier()

    assert simulate(program, ranks=2, seeds=(0,)).proved
    return [plans[rank] for rank in range(2)]


def replicated(change=lambda ranks: None):
    """Judge four decoding ranks: two share out the keys of some heads, two those of others."""
    ranks = []
    for rank in range(4):
        writes = {"request": [0], "position": [4 + rank % 2], "count": [1], "slot": [2]}
        call = {"request": [0, 0], "row": [0, 1], "rows": [1, 1], "keys": [3 - rank % 2, 3]}
        rows = {"request": [0], "position": [4], "count": [2]}
        ranks.append({"rows": rows, "segments": call, "key_lens": [3], "writes": writes})
    change(ranks)
    requests, cache = [{"prefix": 4, "extend": 2}], {"page_size": 4, "shards": 2}
    document = {"requests": requests, "queries": "all", "cache": cache, "ranks": ranks}
    return lint({"schema": "cpattn-plan/1", **document})


def test_ranks_of_one_shard_have_other_heads():
    report = replicated()
    assert report.findings == ()
    assert {"OWN", "COV", "LEN"} <= set(report.checked)
    (found,) = replicated(lambda ranks: ranks[2]["segments"]["keys"].__setitem__(0, 2)).findings
    assert (found.kind, found.ranks) == ("cov-shard", (2,))
    nothing = {name: [] for name in ("request", "position", "count", "slot")}
    (found,) = replicated(lambda ranks: ranks[3].update(writes=nothing)).findings
    assert found.what == "position 5 of request 0 is written 0 times by ranks 2, 3, not once"
    left = replicated(lambda ranks: ranks[3].pop("writes")).not_checked["OWN"]
    assert "3 ranks that write have not as many of each shard" in left


@pytest.mark.parametrize("places", ["positions", "heads"])
def test_decodes_may_be_on_every_rank_beside_a_prefill_that_is_split(places):
    """Each rank has all keys of the decodes for its own heads, or some of the keys."""
    ranks = []
    for rank in range(2):
        rows = {"request": [0, 1], "position": [4 * rank, 5], "count": [4, 1]}
        first, keys = (0, 6) if places == "heads" else (3 * rank, 3)
        calls = {"row": [0, 4], "rows": [4, 1], "first": [0, first], "keys": [4 * rank + 4, keys]}
        ranks.append({"rows": rows, "segments": {"request": [0, 1], **calls}})
    decode = {"prefix": 5, "extend": 1, "queries": "all"}
    document = {"schema": "cpattn-plan/1", "requests": [{"extend": 8}, decode], "ranks": ranks}
    assert kinds(document) == set()
    assert kinds(document | {"requests": [{"extend": 8}, {"prefix": 5, "extend": 1}]}) >= {
        "own-token"
    }
    ranks[1]["segments"]["keys"][1] -= 1
    assert kinds(document) == {"cov-pair"}
    for rank, part in enumerate(ranks):
        part["heads"] = {"q": [rank if places == "heads" else 0]}
    assert kinds(document) == {"cov-pair"}
    ranks[1]["segments"]["keys"][1] += 1
    assert kinds(document) == set()
    for column in ranks[1]["segments"].values():
        column.pop()
    assert kinds(document) == {"cov-pair"}


@pytest.mark.parametrize("strategy", ["zigzag", "decode"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_rank_that_takes_another_placement_is_found(placement, strategy):
    """Such a rank writes or reads rows that belong to others."""
    other = TokenInterleave(shard_size=2, interleave=4 if placement != "page_interleave" else 1)
    plans = plans_of(placement, strategy)
    plans[1] = replace(plans[1], placement=other)
    assert kinds(from_sharded_plans(plans, NUM_PAGES)) & {"own-slot", "cov-pair"}


def test_pages_that_attention_reads_are_looked_at():
    plans = plans_of("page_interleave")
    assert kinds(from_sharded_plans(plans, NUM_PAGES)) == set()
    call = plans[0].batch.call(1, plans[0].local_rows, causal=True, window=None)
    call.kv_indices[0] += 1  # the other rank's pool; calls are made once
    assert "cov-pair" in kinds(from_sharded_plans(plans, NUM_PAGES))
    masked = replace(plans[0], batch=replace(plans[0].batch, mask=np.ones(4, bool)))
    with pytest.raises(NotUsable, match="plans must have no masks"):
        from_sharded_plans([masked, plans[1]])


def test_striped_writes():
    placement = PageInterleave(shard_size=2, page_size=2)
    slots = np.array([4, 5, 6, 7, 8, 10, 11])
    writes = [placement.filter_local(slots, rank) for rank in range(2)]
    arguments = [5, 2], [0, 2], [[2, 3, 4], [9, 5]]
    options = {"page_size": 2, "num_pages": 12}
    report = lint(from_striped_writes(*arguments, writes, placement, **options))
    assert report.findings == ()
    assert set(report.checked) >= {"OWN", "LEN", "ADDR"}
    for damage in (
        lambda tokens, rows: (tokens[1:], rows[1:]),  # no rank has the token
        lambda tokens, rows: (tokens, rows + 1),  # these rows belong to others
        lambda tokens, rows: (np.append(tokens, 0), np.append(rows, rows[0])),  # two have it
    ):
        broken = [writes[0], damage(*writes[1])]
        assert kinds(from_striped_writes(*arguments, broken, placement, **options)) == {"own-slot"}


def test_selections_of_context_parallel_ranks():
    arguments = [2], [2], [([0], [2]), ([0], [3])]  # a query on each rank, behind two cached keys
    options = {"scores": [[[5, 1, 3]], [[5, 1, 3, 4]]]}
    right = [[[2, 0]], [[0, 3]]]
    assert lint(from_topk(*arguments, right, topk=2, **options)).checked == ("TOPK",)
    for indices, topk, found in (
        (right, 2, set()),
        (right, 3, {"topk-count"}),
        ([[[2, 0]], [[0, 2]]], 2, {"topk-score"}),
        ([[[2, 2]], [[0, 3]]], 2, {"topk-twice", "topk-score"}),
    ):
        assert kinds(from_topk(*arguments, indices, topk=topk, **options)) == found
    with pytest.raises(NotUsable, match="rank 1 must have a line of indices for each of its rows"):
        from_topk(*arguments, [right[0], []], topk=2)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_ranks_select_together_is_the_topk_of_all_keys(placement):
    plans, chance, topk = plans_of(placement, "decode"), np.random.default_rng(0), 4
    scores, indices = [], [[], []]
    for table, total, new in zip(TABLES, TOTAL, Q_LENS, strict=True):
        for end in range(total - new + 1, total + 1):
            scores.append(chance.permutation(total))
            best = np.argsort(-scores[-1][:end])[:topk]
            slots = np.array(table)[best // PAGE_SIZE] * PAGE_SIZE + best % PAGE_SIZE
            for rank in range(2):
                _, rows = PLACEMENTS[placement].filter_local(slots, rank)
                indices[rank].append([*rows.tolist(), *[-1] * (topk - len(rows))])
    report = lint(from_sharded_topk(plans, indices, topk=topk, scores=scores))
    assert (report.findings, report.checked) == ((), ("TOPK",))
    rank, query, place = np.argwhere(np.asarray(indices) >= 0)[0]
    indices[rank][query][place] = -1
    document = from_sharded_topk(plans, indices, topk=topk, scores=scores)
    assert kinds(document) & {"topk-count", "topk-score"}


def test_a_placement_that_cannot_tell_slots_of_rows_is_refused():
    """`ContextParallel` can plan with it, but the linter has to find slots from rows."""
    placement = object()
    with pytest.raises(NotUsable, match="must have a method global_index, got object"):
        from_striped_writes([1], [0], [[2]], [([0], [8])], placement, page_size=4, num_pages=3)
