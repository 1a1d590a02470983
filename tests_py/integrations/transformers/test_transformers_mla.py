# SPDX-License-Identifier: Apache-2.0
"""Models of transformers with latent caches, on expanded keys and on the latents themselves."""

from __future__ import annotations

import functools
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

from torch import Tensor  # noqa: E402

from cpattn.integrations import transformers as integration  # noqa: E402
from cpattn.integrations.transformers import absorb_mla, contiguous, mla  # noqa: E402
from support.tolerances import assert_logits_close  # noqa: E402
from support.transformers import latent_models  # noqa: E402
from support.transformers.latent_models import IN_FORMS, RUNS, form_of, logits, make_model  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    integration.register()


models = functools.cache(make_model)


@pytest.fixture(scope="module")
def deepseek() -> Any:
    return models("deepseek_v3")


@functools.cache
def logits_of_eager(name: str, run: str) -> Tensor:
    return logits(models(name), run, "eager")


@pytest.mark.parametrize(("name", "form"), IN_FORMS)
@pytest.mark.parametrize("run", RUNS)
def test_logits_are_those_of_eager(name: str, run: str, form: str) -> None:
    with form_of(models(name), form):
        actual = logits(models(name), run, "cpattn")
    assert_logits_close(actual, logits_of_eager(name, run))


@pytest.mark.parametrize(("name", "form"), IN_FORMS)
def test_greedy_tokens_are_those_of_eager(name: str, form: str) -> None:
    expected = latent_models.greedy(models(name), "eager")
    assert len(expected.unique()) > 8
    with form_of(models(name), form):
        assert torch.equal(latent_models.greedy(models(name), "cpattn"), expected)


@pytest.fixture
def expanding(deepseek: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many keys were expanded in each call that did so."""
    calls = []
    layer = type(deepseek.model.layers[0].self_attn)
    expand_kv = layer.expand_kv

    def watched(module: Any, latent: Tensor, k_rope: Tensor) -> Any:
        calls.append(latent.shape[2])
        return expand_kv(module, latent, k_rope)

    monkeypatch.setattr(layer, "expand_kv", watched)
    return calls


def test_a_prompt_is_expanded_and_what_follows_is_not(deepseek: Any, expanding: list[int]) -> None:
    with absorb_mla(deepseek):
        logits(deepseek, "chunks", "cpattn")
    assert expanding == [11] * 3  # the first chunk in each layer
    expanding.clear()
    logits(deepseek, "chunks", "cpattn")
    assert expanding == [length for length in (11, 30, 31, 50) for _ in range(3)]


def test_the_cheaper_form_at_the_size_of_deepseek_v3() -> None:
    class Layer:
        kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim, v_head_dim = 512, 64, 128, 128

    def multiplications(queries: int, keys: int, dims: int, projected: int) -> int:
        return queries * keys * dims + projected * 512 * 256

    for queries in (1, 100, 165, 170, 171, 4096):
        for keys in (queries, 6000, 100_000):
            absorbed = multiplications(queries, keys, 576 + 512, queries)
            expanded = multiplications(queries, keys, 192 + 128, keys)
            assert mla.absorbing_is_cheaper(Layer, queries, keys) == (absorbed < expanded)


def test_other_implementations_and_removal_see_the_models_own_method(deepseek: Any) -> None:
    expected = logits(deepseek, "chunks", "sdpa")
    layers = [layer.self_attn for layer in deepseek.model.layers]
    absorbed = absorb_mla(deepseek)
    assert torch.equal(logits(deepseek, "chunks", "sdpa"), expected)
    assert all("expand_kv" in vars(layer) for layer in layers)
    absorbed.remove()
    assert not any("expand_kv" in vars(layer) for layer in layers)
    with absorb_mla(deepseek):
        absorbed.remove()  # again: what others replaced since stays
        assert all("expand_kv" in vars(layer) for layer in layers)


def test_another_name_of_the_registration(deepseek: Any, expanding: list[int]) -> None:
    integration.register("somebody")
    with absorb_mla(deepseek, "somebody"):
        logits(deepseek, "left padded chunks", "somebody")
    assert expanding == [48] * 3


def test_models_that_are_refused(deepseek: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with absorb_mla(deepseek), pytest.raises(ValueError, match="expand_kv of DeepseekV3Attention"):
        absorb_mla(deepseek)
    with pytest.raises(ValueError, match=r"absorb_mla: the model must have layers .* got Linear"):
        absorb_mla(torch.nn.Linear(1, 1))
    modules = deepseek.model.layers[1].self_attn._modules
    monkeypatch.setitem(modules, "kv_b_proj", torch.nn.Linear(2, 3))
    with pytest.raises(ValueError, match=r"kv_b_proj must be .* without bias, .* bias=True"):
        absorb_mla(deepseek)


def test_an_adapter_that_comes_later(deepseek: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Adapted(torch.nn.Linear):
        """Whose weight is that of the base alone, as with adapters of peft."""

    modules = deepseek.model.layers[1].self_attn._modules
    out_features, in_features = modules["kv_b_proj"].weight.shape
    with absorb_mla(deepseek):
        monkeypatch.setitem(modules, "kv_b_proj", Adapted(in_features, out_features, bias=False))
        with pytest.raises(ValueError, match=r"kv_b_proj must be .* got Adapted"):
            logits(deepseek, "chunks", "cpattn")


@pytest.mark.parametrize("form", ["heads", "latents"])
@pytest.mark.parametrize("run", ["left padded", "left padded chunks"])
def test_layers_in_bfloat16(run: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla, "absorbing_is_cheaper", lambda *_: True)
    model = make_model("deepseek_v3", torch.bfloat16)
    attend = contiguous.contiguous_attention if form == "heads" else mla.mla_attention
    with latent_models.checked_attention(attend) as layers, form_of(model, form, "checked"):
        logits(model, run, "checked")
    assert layers == [0, 1, 2] * len(RUNS[run][0])
