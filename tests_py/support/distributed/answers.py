# SPDX-License-Identifier: Apache-2.0
"""Answers of all ranks: they must agree with the oracle, and have equal bits on every rank."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch

import cpattn
from support.cases import assert_attention, expected_attention
from support.distributed.layer_worker import LAYERS, LayerRun, decoded
from support.distributed.prefill_batches import expected_of
from support.distributed.sharded_worker import Run, equal
from support.tolerances import Expected, assert_attended

EXACT = ("gather", "all_to_all")  # their results have the bits of one pool with all keys


def assert_prefill(answers: list[dict[Run, dict[str, Any]]], run: Run) -> None:
    dtype = str(run.case.dtype).removeprefix("torch.")
    mine = answers[0][run]
    assert_attended(*mine["sharded"], expected_of(run.case), dtype, op="ring of ranks")
    assert_attended(*mine["replicated"], expected_of(run.case), dtype)
    assert mine["sharded"][0].dtype == mine["replicated"][0].dtype == run.case.dtype
    for told in (answer[run] for answer in answers):
        assert equal(told["sharded"], mine["sharded"])
        assert equal(told["replicated"], mine["replicated"])
        assert run.exchange not in EXACT or equal(told["sharded"], told["replicated"])
        assert told["pools"]
        assert told["strides"]
        assert told["positions"]
        assert not any(x.any() for x in told["padding"])


@cache
def expected_layer(name: str) -> tuple[Expected, tuple[torch.Tensor, torch.Tensor]]:
    """Return the answers of the oracle and of one process with all keys."""
    inputs = LAYERS[name].inputs()
    alone = cpattn.paged_attention(**inputs, batch_invariant=True, return_lse=True)
    return expected_attention(decoded(inputs)), alone


def assert_layer(
    answers: list[dict[LayerRun, dict[str, Any]]], run: LayerRun, *, exact: bool = False
) -> None:
    expected, alone = expected_layer(run.name)
    exact = exact or run.placement is None or run.exchange in EXACT
    for told in (answer[run] for answer in answers):
        results = told["out"], told["lse"]
        inputs = decoded(LAYERS[run.name].inputs())
        assert_attention(*results, inputs, op="ring of ranks", expected=expected)
        assert not exact or equal(results, alone)
        assert [way for way, same in told["ways"].items() if not same] == []


def by_size(runs: Mapping[int, Sequence[Any]]) -> list[Any]:
    """Return parameters (size, run) of worlds; worlds of more than two ranks are marked slow."""
    return [
        pytest.param(size, run, marks=pytest.mark.slow if size > 2 else (), id=f"{run}, {size}")
        for size, of_size in runs.items()
        for run in of_size
    ]
