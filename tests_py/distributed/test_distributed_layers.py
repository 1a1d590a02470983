# SPDX-License-Identifier: Apache-2.0
"""Layers with masks, windows, codes and latents, by each exchange and every way of writing keys."""

from __future__ import annotations

import pytest

from support.distributed import layer_worker as worker
from support.distributed.answers import assert_layer
from support.distributed.distributed_worker import run_world
from support.distributed.layer_worker import REPLICATED, layer_runs
from support.distributed.sharded_worker import equal

RUNS = REPLICATED + layer_runs()


@pytest.fixture(
    scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)], ids="{} ranks".format
)
def answers(request, tmp_path_factory):
    return run_world(request.param, tmp_path_factory.mktemp("world"), worker.run_layers, RUNS)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_layer_is_that_of_the_oracle_by_every_way(answers, run):
    """By one call that writes, and with cached keys of the next layer sent ahead, too."""
    assert_layer(answers, run)


def test_sparse_layers_over_whole_pools_have_the_bits_of_one_process(tmp_path):
    expected = worker.sparse_alone()
    for answer in run_world(3, tmp_path, worker.run_sparse):
        for results in answer.values():
            assert equal(results, expected)
