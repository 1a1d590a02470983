# SPDX-License-Identifier: Apache-2.0
"""The sweep over all types of text models of transformers is right, and so is its page."""

import re

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

import family_table as families  # noqa: E402
from family_table import BATCHES, PAGE, PARTS, RANKS, Calls, Outcome, try_model  # noqa: E402

from cpattn.integrations import transformers as integration  # noqa: E402

pytestmark = [pytest.mark.usefixtures("one_torch_thread"), pytest.mark.slow]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    for name in ("attention", "paged_attention_forward"):  # restored at the end
        monkeypatch.setattr(integration, name, getattr(integration, name))
    yield Calls()
    monkeypatch.undo()
    integration.register()


@pytest.mark.parametrize("model_type", ["llama", "bert", "gpt_oss", "qwen2_moe", "olmo3"])
def test_models_of_many_families_are_right(calls, model_type):
    words = {part: outcome.word for part, outcome in try_model(model_type, calls).items()}
    assert words == dict.fromkeys((*PARTS, BATCHES, RANKS), "yes")


def test_outcomes_of_single_models(calls):
    """DeepSeek-V4 adds columns of 0 and -inf, which would hide nothing in a bool mask."""
    outcomes = try_model("deepseek_v4", calls)
    assert [outcomes[part].word for part in ("prompt", "padding", "generate")] == ["yes"] * 3
    assert try_model("bloom", calls)["prompt"] == Outcome("own")  # it calls no function
    for name in ("doge", "inkling_text"):  # they have biases of each head and query
        outcomes = try_model(name, calls)
        assert [outcomes[part].word for part in PARTS] == ["yes"] * len(PARTS)
    refused = try_model("hy_v4", calls)
    assert refused["prompt"].word == refused[RANKS].word == "refused"
    assert "s_aux is not supported" in refused["prompt"].reason


def test_wrong_attention_differs(calls, monkeypatch):
    family, right = families.Family("llama"), integration.attention

    def scaled(*arguments, **options):
        out, weights = right(*arguments, **options)
        return out * 1.001, weights

    monkeypatch.setattr(integration, "attention", scaled)
    integration.register()
    assert families.try_part(family, "prompt", calls).word == "differs"


def test_the_page_has_every_type():
    page = PAGE.read_text()
    found = page.partition(families.BEGIN)[2].partition(families.END)[0]
    rows = re.findall(r"^\| (\S+) \| (?:yes|own|differs|refused|fails|-) ", found, re.MULTILINE)
    others = re.search(r"Not built small by the script: (.*)\.$", found, re.MULTILINE)
    assert sorted([*rows, *(others[1].split(", ") if others else [])]) == families.text_models()
    assert "| differs |" not in found
    assert "| fails |" not in found
