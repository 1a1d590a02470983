# SPDX-License-Identifier: Apache-2.0
"""Parts of bench/sparse whose faults would make benchmarks wrong."""

import pytest
import torch

from bench.harness import runner
from bench.harness.comparison import Bar, Comparison, Wrong, percent_longer, times_as_fast
from bench.sparse import indexer, topk

SMALL = indexer.Inputs(num_tokens=32, kv_len=100, num_heads=4)
TOPK = 16


def exact_topk(inputs, topk):
    rows = [torch.from_numpy(indexer.exact(inputs, i, int(n))) for i, n in enumerate(inputs.ke)]
    return [row.topk(topk).indices for row in rows]


@pytest.mark.parametrize(
    "score",
    [indexer.score_blocks, indexer.score_rows, indexer.score_einsum],
    ids=lambda f: f.__name__,
)
def test_torch_forms_are_right(score, monkeypatch):
    monkeypatch.setattr(indexer, "KEYS", 32)  # several blocks and a part of one
    checker = indexer.Checker(SMALL, {})
    logits = indexer.torch_logits(SMALL, score(SMALL))()
    checker.logits("torch", logits)
    chosen = indexer.torch_topk(SMALL, score(SMALL), TOPK)()
    checker.topk("torch", chosen, TOPK)


def found_wrong(check, name, result, *rest, match=None):
    with pytest.raises(Wrong, match=match):
        check(name, result, *rest)


def test_a_wrong_score_is_found():
    checker = indexer.Checker(SMALL, {})
    logits = torch.full((SMALL.num_tokens, SMALL.kv_len), -torch.inf)
    for i, end in enumerate(SMALL.ke):
        scores = torch.from_numpy(indexer.exact(SMALL, i, int(end)))
        logits[i, : len(scores)] = scores
    checker.logits("cpattn bf16", logits)
    hidden = logits.clone()
    hidden[0, -1] = 0
    found_wrong(checker.logits, "cpattn bf16", hidden, match="hidden")
    logits[-1, 3] += 0.01 * logits[-1].max()
    found_wrong(checker.logits, "cpattn bf16", logits, match="relative error")


def test_a_wrong_choice_is_found():
    checker = indexer.Checker(SMALL, {})
    chosen = exact_topk(SMALL, TOPK)
    assert checker.topk("cpattn bf16", chosen, TOPK) == 0
    twice, worst = ([row.clone() for row in chosen] for _ in range(2))
    twice[0][0] = twice[0][1]
    found_wrong(checker.topk, "cpattn bf16", twice, TOPK, match="distinct")
    worst[-1][0] = int(indexer.exact(SMALL, 31, 100).argmin())
    found_wrong(checker.topk, "cpattn bf16", worst, TOPK, match="relative error")
    comparison = topk.of_shape(8, 64, 8)
    right = comparison.implementations[topk.TORCH]()
    comparison.check(topk.TORCH, right)
    found_wrong(comparison.check, topk.SORTED, right.sort()[0])
    right[3, 2] = right[3, 1]
    found_wrong(comparison.check, topk.TORCH, right)


def compared(**functions):
    def check(name, result):
        if result == "wrong":
            raise Wrong("relative error 2")
        return 0.0

    bars = (
        times_as_fast("ours", "peer", 2, "peer"),
        percent_longer("ours", "other", 5),
        Bar("ours", "of work", 1, lambda timed: timed["ours"]["rate"], at_least=False),
    )
    case = {"job": "test", "threads": 1}
    comparison = Comparison("test", case, functions, check, (1.0, "Gthing"), (1, "thing"), bars)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "peak_of", lambda comparison: lambda: 1.0)  # no measurement
        return runner.run(comparison, budget=0.01)


def test_who_fails_is_a_row_and_has_no_bar():
    def failing():
        raise RuntimeError("why")

    ours, wrong, failed = compared(ours=lambda: 0, peer=lambda: "wrong", other=failing)
    assert (wrong["status"], wrong["reason"]) == ("wrong", "relative error 2")
    assert (failed["status"], failed["reason"]) == ("error", "RuntimeError: why")
    assert [bar["name"] for bar in ours["bars"]] == ["of work"]
    assert not ours["bars"][0]["met"]
    assert "percent_of_peak" not in ours


def test_bars_compare_medians():
    slow = torch.rand(1 << 20)
    ours, peer, other = compared(ours=lambda: 0, peer=slow.sum, other=lambda: 0)
    faster, longer, _ = ours["bars"]
    assert faster["value"] == peer["median"] / ours["median"]
    assert faster["met"]
    assert longer["value"] == pytest.approx(100 * (ours["median"] / other["median"] - 1))
