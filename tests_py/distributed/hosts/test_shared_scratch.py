# SPDX-License-Identifier: Apache-2.0
"""Pools that are shared out, in scratch that the ranks of a host have together."""

from __future__ import annotations

import re

import pytest

from support.cases import assert_attention
from support.distributed.distributed_worker import run_world
from support.distributed.hosts import shards as worker
from support.distributed.layer_cases import decoded, layer_inputs

LAYOUTS = {
    "one host": ((0, 1, 2),),
    "two of two": ((0, 1), (2, 3)),
    "two and one": ((0, 2), (1,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_gather_has_the_bits_that_it_has_by_rank(tmp_path, layout):
    size = sum(map(len, layout))
    for answer in run_world(size, tmp_path, worker.run_gathers, layout):
        assert answer["different"] == []
        assert answer["not written alike"] == []
        assert answer["compared"] > 50
        assert answer["calls"] > 2 * answer["compared"]


def test_keys_cross_the_wire_once_for_each_pair_of_hosts_as_predicted(tmp_path):
    layout = LAYOUTS["two of two"]
    for answer in run_world(4, tmp_path, worker.run_bytes, layout):
        assert answer["sent"] == answer["predicted sent"] > 0
        assert answer["received"] == answer["predicted received"]
        assert answer["sent at home"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_ring_goes_from_host_to_host(tmp_path, layout):
    size = sum(map(len, layout))
    for answer in run_world(size, tmp_path, worker.run_rings, layout):
        assert answer["in rounds"] == answer["by mesh"] == answer["not written alike"] == []
        assert answer["compared"] > 40
        for what, (out, lse) in answer["layers"].items():
            inputs = decoded(layer_inputs(what.split(", ", 2)[2]))
            assert_attention(out, lse, inputs, op="ring of ranks")


def test_each_rank_sends_its_part_of_a_host_round_the_ring(tmp_path):
    for rank, answer in enumerate(
        run_world(4, tmp_path, worker.run_ring_bytes, LAYOUTS["two of two"])
    ):
        keys = 96 // 2 // 2  # half of what its host holds, in two heads
        assert answer["rows"] == [((rank + 2) % 4, keys * 2 * answer["head bytes"])]


@pytest.mark.slow
def test_padding_tokens_may_be_written(tmp_path):
    assert run_world(4, tmp_path, worker.run_padding, LAYOUTS["two of two"]) == [True] * 4


@pytest.mark.slow
def test_scratch_that_a_host_has_no_memory_for_is_an_error_on_all(tmp_path):
    for told in run_world(4, tmp_path, worker.run_without_memory, LAYOUTS["two of two"]):
        assert re.fullmatch(
            r"ContextParallel\.attend: the host of rank 2, 3 has no [\d.e-]+ GiB for scratch "
            r"that 2 ranks share, 0 GiB are available",
            told,
        )
