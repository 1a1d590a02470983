# SPDX-License-Identifier: Apache-2.0
"""Models of transformers with latent caches are right on expanded keys and on the latents, and
DeepSeek-V3.2 and GLM-MoE-DSA on our indexer and sparse attention."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

from torch import Tensor  # noqa: E402

from cpattn.integrations import transformers as integration  # noqa: E402
from cpattn.integrations.transformers import absorb_mla, contiguous, dsa, mla, use_indexer  # noqa: E402
from support.tolerances import assert_close, assert_logits_close, to_float64  # noqa: E402
from support.transformers import latent_models  # noqa: E402
from support.transformers.latent_models import (  # noqa: E402
    DSA_CONFIGS,
    IN_FORMS,
    RUNS,
    form_of,
    logits,
    make_model,
)
from support.transformers.tiny_transformers import CACHE  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    integration.register()


models = functools.cache(make_model)
# One run has chunks, single tokens and padding together.
each_run = pytest.mark.parametrize(
    "run",
    [x if x == "left padded chunks" else pytest.param(x, marks=pytest.mark.slow) for x in RUNS],
)


@pytest.fixture(scope="module")
def deepseek() -> Any:
    return models("deepseek_v3")


@functools.cache
def logits_of_eager(name: str, run: str) -> Tensor:
    return logits(models(name), run, "eager")


@pytest.mark.parametrize(("name", "form"), IN_FORMS)
@each_run
def test_logits_are_those_of_eager(name: str, run: str, form: str) -> None:
    with form_of(models(name), form):
        actual = logits(models(name), run, "cpattn")
    assert_logits_close(actual, logits_of_eager(name, run))


def test_a_prompt_is_expanded_and_what_follows_is_not(deepseek: Any, monkeypatch: Any) -> None:
    expanded = []
    layer = type(deepseek.model.layers[0].self_attn)
    expand_kv = layer.expand_kv

    def watched(module: Any, latent: Tensor, k_rope: Tensor) -> Any:
        expanded.append(latent.shape[2])
        return expand_kv(module, latent, k_rope)

    monkeypatch.setattr(layer, "expand_kv", watched)
    with absorb_mla(deepseek):
        logits(deepseek, "chunks", "cpattn")
    assert expanded == [11] * 3  # the first chunk in each layer
    expanded.clear()
    logits(deepseek, "chunks", "cpattn")
    assert expanded == [length for length in (11, 30, 31, 50) for _ in range(3)]


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
        absorbed.remove()  # a second call keeps later replacements by others
        assert all("expand_kv" in vars(layer) for layer in layers)


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
        """Layer whose weight is only the base's, as with adapters of peft."""

    modules = deepseek.model.layers[1].self_attn._modules
    out_features, in_features = modules["kv_b_proj"].weight.shape
    with absorb_mla(deepseek):
        monkeypatch.setitem(modules, "kv_b_proj", Adapted(in_features, out_features, bias=False))
        with pytest.raises(ValueError, match=r"kv_b_proj must be .* got Adapted"):
            logits(deepseek, "chunks", "cpattn")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["heads", "latents"])
@pytest.mark.parametrize("run", ["left padded", "left padded chunks"])
@pytest.mark.parametrize("name", ["deepseek_v3", *sorted(DSA_CONFIGS)])
def test_layers_in_bfloat16(name: str, run: str, form: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(mla, "absorbing_is_cheaper", lambda *_: True)
    model = make_model(name, torch.bfloat16)
    attend = contiguous.contiguous_attention if form == "heads" else mla.mla_attention
    attend = dsa.dsa_attention if name in DSA_CONFIGS else attend
    with latent_models.checked_attention(attend) as layers, form_of(model, form, "checked"):
        logits(model, run, "checked")
    assert layers == [0, 1, 2] * len(RUNS[run][0])


@pytest.fixture(scope="module", params=sorted(DSA_CONFIGS))
def model(request: pytest.FixtureRequest) -> Any:
    return models(request.param)


@contextmanager
def watched_indexers(model: Any, see: Callable[..., None]) -> Iterator[None]:
    """Call `see(indexer, args, kwargs, chosen)` for every call of an indexer."""
    handles = [
        layer.self_attn.indexer.register_forward_hook(see, with_kwargs=True)
        for layer in model.model.layers
        if layer.self_attn.indexer is not None
    ]
    yield
    for handle in handles:
        handle.remove()


@each_run
def test_the_indexer_chooses_the_same_keys(model: Any, run: str) -> None:
    rows = 0

    def see(indexer: Any, args: Any, kwargs: Any, theirs: Tensor) -> None:
        nonlocal rows
        mask, cache = args[3], kwargs[CACHE]
        # The cache already has the keys of this call.
        seen = SimpleNamespace(update_indexer=lambda _, layer: cache.layers[layer].indexer_keys)
        model.config._attn_implementation = "cpattn"
        ours = indexer.forward(*args, **{CACHE: seen})
        model.config._attn_implementation = "sdpa"
        assert ours.dtype == theirs.dtype == torch.int32
        assert torch.equal(visible_keys(ours, mask), visible_keys(theirs, mask))
        rows += theirs[..., 0].numel()

    with use_indexer(model), watched_indexers(model, see):
        logits(model, run, "sdpa")
    chunks, padding = RUNS[run]
    indexers = sum(layer.self_attn.indexer is not None for layer in model.model.layers)
    assert rows == indexers * len(padding) * sum(chunks)


def visible_keys(indices: Tensor, mask: Tensor) -> Tensor:
    """Return the chosen keys that the mask shows, ascending, then -1."""
    visible = mask.gather(-1, indices.clamp(min=0).long()) & (indices >= 0)
    last = mask.shape[-1]
    ascending = indices.where(visible, last).sort(-1).values
    return ascending.where(ascending < last, -1)


def layer_inputs(model: Any, latents: bool) -> tuple[Any, ...]:
    """Return a layer, and its query, key, value, mask and indices of two sequences, one padded."""
    layer = model.model.layers[0].self_attn
    generator = torch.Generator().manual_seed(11)
    heads, keys, queries = layer.num_heads, 40, 6
    shapes = (
        [(1, keys, layer.kv_lora_rank), (1, keys, layer.qk_rope_head_dim)]
        if latents
        else [(heads, keys, layer.qk_head_dim), (heads, keys, layer.v_head_dim)]
    )
    query = torch.randn(2, heads, queries, layer.qk_head_dim, generator=generator)
    key, value = (torch.randn(2, *shape, generator=generator) for shape in shapes)
    positions = torch.arange(keys)
    mask = positions <= torch.arange(keys - queries, keys)[:, None]
    mask = torch.stack([mask, mask & (positions >= 30)])[:, None]
    scores = torch.rand(2, queries, keys, generator=generator)
    indices = scores.topk(latent_models.TOPK, -1).indices.int()
    return layer, query, key, value, mask, indices


@pytest.mark.parametrize("latents", [False, True])
def test_only_chosen_visible_keys_are_read(model: Any, latents: bool) -> None:
    layer, query, key, value, mask, indices = layer_inputs(model, latents)
    indices[0, 2, 3:] = -1
    indices[1, 0] = -1
    chosen = torch.zeros(2, query.shape[2], key.shape[2] + 1, dtype=torch.bool)
    chosen = chosen.scatter(-1, indices.where(indices >= 0, key.shape[2]).long(), True)[..., :-1]
    chosen &= mask[:, 0]
    model.config._attn_implementation = "cpattn"
    with form_of(model, "latents" if latents else "heads"), torch.inference_mode():
        expanded = (
            type(layer).expand_kv(layer, key, value) if latents else (key.clone(), value.clone())
        )
        unread = ~chosen.any(1)
        assert unread.any()
        key[unread[:, None].expand(-1, key.shape[1], -1)] = torch.nan
        value[unread[:, None].expand(-1, value.shape[1], -1)] = torch.nan
        out, _ = dsa.dsa_attention(layer, query, key, value, mask, scaling=0.2, indices=indices)
    scores = (0.2 * query @ expanded[0].mT).masked_fill(~chosen[:, None], -torch.inf)
    weights = scores.softmax(-1).nan_to_num()  # a row without keys gives zeros
    assert not out[1, 0].any()
    expected, magnitude = (
        to_float64((weights @ values).transpose(1, 2))
        for values in (expanded[1], expanded[1].abs())
    )
    # The unit is the largest magnitude, as expanded latents have sums in another order.
    assert_close(out, expected, magnitude.max(), "attention", "float32")


def test_a_compiled_layer() -> None:
    model = make_model("deepseek_v32")
    expected = logits(model, "left padded", "eager")
    with form_of(model, "latents, indexer"):
        model.model.layers[1].self_attn.compile(backend="eager")
        actual = logits(model, "left padded", "cpattn")
    torch._dynamo.reset()
    assert_logits_close(actual, expected)


def test_what_an_indexer_refuses(model: Any) -> None:
    layer, query, key, value, mask, indices = layer_inputs(model, latents=False)
    with pytest.raises(ValueError, match=r"dropout must be 0, call model.eval\(\); got 0.1"):
        dsa.dsa_attention(layer, query, key, value, mask, scaling=1, indices=indices, dropout=0.1)
    mask[0, 0, 0, 3] = False
    with pytest.raises(ValueError, match="must be one range of keys"):
        dsa.visible_ranges(mask[:, 0])
    with use_indexer(model), pytest.raises(ValueError, match=r"forward of .*Indexer is replaced"):
        use_indexer(model)
    with pytest.raises(ValueError, match=r"use_indexer: the model must have .* got Linear"):
        use_indexer(torch.nn.Linear(1, 1))
