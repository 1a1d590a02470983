# SPDX-License-Identifier: Apache-2.0
"""`ContextParallel.prefetch` gets cached keys ahead, and layers have the same bits as without."""

import pytest
import torch

from cpattn.distributed import LayerCaches, Prefetch
from support.distributed import prefetch_worker as worker
from support.distributed.distributed_worker import run_world
from support.distributed.planning import one_rank


@pytest.fixture(scope="module")
def traffic(tmp_path_factory):
    return run_world(2, tmp_path_factory.mktemp("world"), worker.run_traffic)


def test_the_next_layer_is_sent_before_one_is_computed(traffic):
    """New keys of the layer are sent and awaited before it; the last layer has no next."""
    prefix = "attend (prefix)"
    before = ["post attend"] * 3 + [f"finish {prefix}"]
    after = ["finish attend", "compute"] * 3
    layer = [*before, f"post {prefix}", *after]
    for answer in traffic:
        assert answer["events"] == [*layer, *layer, *before, *after]


def test_cached_keys_travel_once_and_new_ones_alone_in_their_layer(traffic):
    row = worker.CASE.num_kv_heads * (worker.CASE.head_dim + worker.CASE.v_head_dim) * 4
    for answer in traffic:
        ahead, *layers = answer["received"]
        assert layers[0] == layers[1]
        # Apart from the agreements, the difference is cached keys of the next layer.
        assert ahead - (layers[0] - layers[2]) < 1024
    cached = sum(answer["received"][1] - answer["received"][3] for answer in traffic)
    assert cached == sum(worker.CASE.prefixes) * row


def test_buffers_are_two_of_the_stated_size_and_heads_fit_into_the_rest(traffic):
    for answer in traffic:
        assert len(answer["buffers"]) == 2
        assert sum(answer["buffers"]) == answer["buffer_bytes"]
        assert answer["widths"] == [1, 2]


def test_a_rank_that_does_otherwise_is_named(tmp_path):
    refused = "RuntimeError: ContextParallel.{}: rank 1 refused its arguments; nothing was sent"
    for rank, (told, right) in enumerate(run_world(3, tmp_path, worker.run_disagreements)):
        assert right  # layers after refused or dropped calls
        assert told.pop("dropped").endswith("the last one of this object, got one before it")
        own = {name: told.pop(name) for name in ("other caches", "refused")}
        if rank == worker.ODD_RANK:
            assert "must have the caches of this call as layer 0" in own["other caches"]
            assert "layers must be one at least, got none" in own["refused"]
        else:
            assert own["other caches"].startswith(refused.format("attend"))
            assert own["refused"].startswith(refused.format("prefetch"))
        differs = "{} of rank 1 differs from rank 0; nothing was sent"
        assert told == {
            "without": f"RuntimeError: ContextParallel.attend: {differs.format('prefetch')}",
            "attends": told["attends"],
            **{
                name: f"RuntimeError: ContextParallel.prefetch: {differs.format('options')}"
                for name in ("fewer layers", "another window")
            },
        }
        assert "from rank 0 (rank 0 calls prefetch, rank 1 calls attend)" in told["attends"]


@pytest.mark.slow
def test_what_is_under_way_arrives_though_all_has_been_dropped(tmp_path):
    assert run_world(2, tmp_path, worker.run_dropped, group_timeout=4) == [True, True]


def plan_of(cp):
    return cp.plan([5], [7], block_tables=[[2, 0]])


def pools():
    return tuple(torch.ones(2, 12, 1, 16))


def attend(cp, plan, caches, **options):
    q, new = torch.zeros(5, 2, 16), torch.zeros(5, 1, 16)
    return cp.attend(plan, q, *caches, k_local=new, v_local=new, **options)


def test_a_layer_is_taken_once(world):
    cp, caches = one_rank(), pools()
    plan = plan_of(cp)
    prefixes = cp.prefetch(plan, [caches])
    assert isinstance(prefixes, Prefetch)
    attend(cp, plan, caches, prefetched=prefixes)
    with pytest.raises(ValueError, match="prefetched must have a layer left, got one with all 1"):
        attend(cp, plan, caches, prefetched=prefixes)


def test_what_an_attend_refuses(world):
    cp, caches = one_rank(), pools()
    plan = plan_of(cp)
    prefixes = cp.prefetch(plan, [LayerCaches(*caches, window=3)])
    with pytest.raises(ValueError, match=r"must have the window of .* got 3 for None"):
        attend(cp, plan, caches, prefetched=prefixes)
    with pytest.raises(ValueError, match="must have the caches of this call as layer 0"):
        attend(cp, plan, pools(), prefetched=prefixes, window=3)
    other = cp.plan([5], [6], block_tables=[[2, 0]])
    with pytest.raises(ValueError, match="must be of the plan of this call"):
        attend(cp, other, caches, prefetched=prefixes, window=3)
    with pytest.raises(ValueError, match="must be of this object, got one of another"):
        attend(one_rank(), plan, caches, prefetched=prefixes, window=3)
    with pytest.raises(TypeError, match=r"must be of ContextParallel\.prefetch, got int"):
        attend(cp, plan, caches, prefetched=1)
    replicated = one_rank(placement=None)
    with pytest.raises(ValueError, match="prefetched needs a plan of sharded pools"):
        attend(replicated, plan_of(replicated), caches, prefetched=prefixes)
    codes = tuple(torch.ones(2, 12, 1, 16, dtype=torch.int8))
    prefixes = cp.prefetch(plan, [codes])
    scales = dict.fromkeys(("k_scale", "v_scale"), torch.ones(12, 1))
    with pytest.raises(ValueError, match="of each token need the exchange pass_q, got gather"):
        cp.attend(plan, torch.zeros(5, 2, 16), *codes, prefetched=prefixes, **scales)


def test_keys_are_not_sent_before_they_are_written(world):
    cp = one_rank()
    plan = cp.plan([4, 1], [4, 5], block_tables=[[1, -1], [1, 0]])
    with pytest.raises(ValueError, match="plan must have no new token that another request has"):
        cp.prefetch(plan, [pools()])


def test_layers_may_differ_in_shape(world):
    cp = one_rank()
    plan = plan_of(cp)
    layers = [pools(), tuple(torch.rand(2, 12, 2, 16))]
    prefixes = cp.prefetch(plan, layers)
    assert prefixes.buffer_bytes == 2 * 2 * 2 * 32 * 4  # two buffers of two rows of the larger
    attend(cp, plan, layers[0], prefetched=prefixes)
    q = torch.rand(5, 2, 16)
    out = cp.attend(plan, q, *layers[1], prefetched=prefixes)
    assert torch.equal(out, cp.attend(plan, q, *layers[1]))
