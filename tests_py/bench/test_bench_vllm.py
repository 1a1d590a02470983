# SPDX-License-Identifier: Apache-2.0
"""The parts of bench_vllm.py that a wrong benchmark would come from; vLLM is not needed."""

from __future__ import annotations

import pytest

from bench.harness.contender import Failed
from bench.serving import vllm_steps
from bench.serving.load import Load, from_trace, spread
from bench.serving.turns import NEAR_TIE, Engine, compare_tokens, decode_in_turns
from cpattn.traffic.trace import Request


def answer(*tokens, gap):
    """Each token is ahead of 9 by `gap`, and of nobody else."""
    best = [{str(token): -1.0, "9": -1.0 - gap} for token in tokens]
    return {"tokens": list(tokens), "best": best}


def test_equal_answers_are_counted_up_to_a_near_tie():
    stock = [answer(1, 2, gap=1.0), answer(3, gap=1.0)]
    assert compare_tokens(stock, stock) == 2
    stock, ours = answer(1, 2, 3, gap=NEAR_TIE / 2), answer(1, 9, 5, gap=1.0)
    assert compare_tokens([stock], [ours]) == 0


@pytest.mark.parametrize(("gap", "token"), [(2 * NEAR_TIE, 9), (NEAR_TIE / 2, 5)])
def test_another_token_is_found(gap, token):
    with pytest.raises(Failed, match=f"answer 1: token {token}, not 2"):
        compare_tokens(
            [answer(1, gap=1.0), answer(1, 2, gap=gap)],
            [answer(1, gap=1.0), answer(1, token, gap=1.0)],
        )


def test_short_steps_take_turns_and_medians_are_of_the_rounds():
    asked = []

    class Answering:
        def __init__(self, name, *layers):
            self.name, self.layers = name, iter(layers)

        def ask(self, do, **sizes):
            asked.append((self.name, do, sizes))
            return {"attention": next(self.layers), "seconds": 1.0}

    engines = [Answering("a", 3.0, 1.0, 2.0), Answering("b", 9.0, 4.0, 4.0)]
    assert decode_in_turns(engines, 3, batch=8) == [(2.0, 1.0), (4.0, 1.0)]
    assert asked == 3 * [("a", "decode", {"batch": 8}), ("b", "decode", {"batch": 8})]


def test_an_engine_has_its_settings_in_its_name():
    assert Engine("cpattn", 2).name == "cpattn"
    assert Engine("cpattn", 2, spin=0).name == "cpattn, spinning for 0 µs"
    engine = Engine("cpattn", 2, kv_cache_dtype="fp8", spin=0)
    assert engine.name == "cpattn, fp8, spinning for 0 µs"


def test_arrivals_of_a_time_stamp_are_spread_to_the_next():
    assert spread([3.0, 3.0, 6.0]) == ([0.0, 1.5, 3.0], 6.0)


def test_prompts_share_what_the_trace_shares(tmp_path):
    requests = [Request(0, 1000, 8, (1, 2)), Request(0, 600, 0, (1, 3))]
    work = from_trace(requests, 8, vocab_size=8192, seed=1)
    assert [len(prompt) for prompt in work.prompts] == [125, 75]
    assert work.output_lengths == [1, 1]
    assert (work.prompt_tokens, work.max_tokens) == (200, 126)
    first, second = work.prompts
    assert first[:64] == second[:64]
    assert first[64:75] != second[64:75]
    work.write(tmp_path / "load")
    assert Load.read(tmp_path / "load") == work


def test_a_busy_neighbour_is_there_as_long_as_it_is_asked_for():
    with vllm_steps.busy_neighbour() as process:
        assert process.poll() is None
    assert process.poll() is not None
