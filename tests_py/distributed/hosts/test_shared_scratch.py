# SPDX-License-Identifier: Apache-2.0
"""Sharded pools with scratch that the ranks of a host share."""

import re

import pytest
import torch

from support.distributed.answers import assert_layer
from support.distributed.distributed_worker import run_world
from support.distributed.hosts import shards as worker
from support.distributed.hosts.layouts import size_of
from support.distributed.sharded_worker import Step

ONE, TWO, UNEVEN = ((0, 1, 2),), ((0, 1), (2, 3)), ((0, 2), (1,))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [ONE, TWO, UNEVEN])
@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_layers_have_the_bits_that_they_have_without_and_in_rounds(tmp_path, layout, exchange):
    answers = run_world(size_of(layout), tmp_path, worker.run_layers, layout, exchange)
    for answer in answers:
        assert answer["different"] == []
        assert (answer["calls"] > 2 * len(answer["layers"])) == (exchange == "gather")
    for run in worker.runs_of(exchange):
        assert_layer([answer["layers"] for answer in answers], run)


def test_steps_have_the_bits_that_they_have_without_and_one_host_sends_nothing(tmp_path):
    steps = [
        Step("drafts", (9, 5, 70, 33), (4, 5, 3, 1), num_heads=8, options=(("sinks", None),)),
        Step("bfloat16", (150, 33), (1, 3), dtype=torch.bfloat16),
        Step("fewer heads than ranks", (50, 33), (1, 3), num_heads=1, num_kv_heads=1),
        Step("nothing new", (9, 40), (0, 0)),
    ]
    for different, sent in run_world(3, tmp_path, worker.run_steps, ONE, steps):
        assert (different, sent) == ([], 0)


def test_keys_cross_the_wire_once_for_each_pair_of_hosts_as_predicted(tmp_path):
    """Each rank of a ring sends its part of a host to the same place on the next host."""
    head_bytes = 2 * 32 * 4  # keys and values: half of its host's, in two heads
    for rank, answer in enumerate(run_world(4, tmp_path, worker.run_bytes, TWO)):
        assert answer["by ring"] == [((rank + 2) % 4, 96 // 2 // 2 * 2 * head_bytes)]
        assert answer["sent"] == answer["predicted sent"] > 0
        assert answer["received"] == answer["predicted received"]
        assert answer["sent at home"] == 0


def test_padding_nothing_and_no_memory(tmp_path):
    for told in run_world(4, tmp_path, worker.run_edges, TWO):
        assert told["padding"]  # it may be written
        assert (told["rows"], told["written"]) == (0, False)
        assert re.fullmatch(
            r"MemoryError: ContextParallel\.attend: the host of rank 2, 3 has no [\d.e-]+ GiB for "
            r"scratch that 2 ranks share, 0 GiB are available",
            told["told"],
        )
