# SPDX-License-Identifier: Apache-2.0
"""Models of transformers agree with eager on our attention, for every kind of mask and cache."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

import transformers  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import DynamicCache, StaticCache  # noqa: E402

import cpattn.integrations.transformers as integration  # noqa: E402
from cpattn.integrations.transformers import contiguous, masks  # noqa: E402
from support.tolerances import assert_logits_close  # noqa: E402
from support.transformers.tiny_transformers import (  # noqa: E402
    CACHE,
    CONFIGS,
    ENCODERS,
    SIZES,
    generate,
    make_encoder,
    make_model,
    make_tokens,
)

pytestmark = [pytest.mark.usefixtures("one_torch_thread"), pytest.mark.slow]
LENGTH = 30
PADDING = torch.tensor([0, 7, 28])  # padding tokens before each row

integration.register()


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Any:
    return make_model(request.param)


@pytest.fixture
def llama() -> Any:
    return make_model("llama")


def left_padded() -> Tensor:
    return (torch.arange(LENGTH) >= PADDING[:, None]).long()


CACHES = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=LENGTH + 20),
}


CHUNKS = (11, 8, 1, 10)


@torch.inference_mode()
def run(
    model: Any, implementation: str, mask: Tensor, chunks: Any = (LENGTH,), cache: str = "dynamic"
) -> tuple[Tensor, Any]:
    """Return logits of all tokens that are not padding, [n, vocabulary], and the cache."""
    model.set_attn_implementation(implementation)
    tokens, used = make_tokens(*mask.shape), CACHES[cache](model)
    logits, begin = [], 0
    for length in chunks:
        end = begin + length
        positions = (mask[:, :end].cumsum(1) - 1).clamp(min=0)[:, begin:]
        given = {"attention_mask": mask[:, :end], "position_ids": positions}
        logits.append(model(tokens[:, begin:end], **{CACHE: used}, **given).logits)
        begin = end
    return torch.cat(logits, 1)[mask.bool()], used


def both(model: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
    return tuple(run(model, name, *arguments)[0] for name in ("cpattn", "eager"))


@pytest.mark.parametrize("cache", CACHES)
def test_chunks(model: Any, cache: str) -> None:
    assert_logits_close(*both(model, left_padded(), CHUNKS, cache))


def test_right_padding(model: Any) -> None:
    assert_logits_close(*both(model, left_padded().flip(1)))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss"])
def test_caches_are_used_in_place_and_masks_are_numbers(
    name: str, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storages = []

    def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, **options: Any) -> Any:
        assert options["custom_mask"] is None
        storages.extend(x.untyped_storage().data_ptr() for x in (k_cache, v_cache))
        return original(q, k_cache, v_cache, **options)

    original = contiguous.paged_attention
    monkeypatch.setattr(contiguous, "paged_attention", attend)
    _, used = run(make_model(name), "cpattn", left_padded(), CHUNKS, cache)
    assert len(storages) == 4 * 4
    last = [x for layer in used.layers for x in (layer.keys, layer.values)]
    whole = [x.untyped_storage().data_ptr() for x in last]
    # A static sliding window keeps a copy of the tensors that it returns.
    assert storages[-4:][2:] == whole[2:]
    assert storages[-4:] == whole or (name != "llama" and cache == "static")


@torch.inference_mode()
def logits_of(model: Any, implementation: str, batch: int, **given: Any) -> Tensor:
    model.set_attn_implementation(implementation)
    return model(make_tokens(batch, LENGTH), **given).logits


def test_packed_sequences(llama: Any) -> None:
    """Positions separate three sequences in one row: none sees another."""
    positions = torch.cat([torch.arange(n) for n in (5, 14, 11)])[None]
    given = {"position_ids": positions, "use_cache": False}
    expected = logits_of(llama, "eager", 1, **given)
    assert_logits_close(logits_of(llama, "cpattn", 1, **given), expected)


def test_causal_masks_of_layers_that_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of Gemma within PaliGemma are still causal."""
    config = transformers.GemmaConfig(**SIZES, use_bidirectional_attention=True)
    monkeypatch.setitem(CONFIGS, "gemma", lambda: config)
    assert_logits_close(*both(make_model("gemma"), torch.ones(2, LENGTH).long(), CHUNKS))


@pytest.mark.parametrize("name", ENCODERS)
@torch.inference_mode()
def test_an_encoder_sees_both_sides(name: str) -> None:
    model, options = make_encoder(name), {}
    if model.config.is_encoder_decoder:
        options["decoder_input_ids"] = make_tokens(3, 7)
    mask = left_padded().flip(1)
    seen = slice(None) if options else mask.bool()

    def states(implementation: str) -> Tensor:
        model.set_attn_implementation(implementation)
        found = [model(make_tokens(3, LENGTH), attention_mask=x, **options) for x in (mask, None)]
        return torch.cat([x.last_hidden_state[seen] for x in found])

    assert_logits_close(states("cpattn"), states("eager"))


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", ["t5", "mt5", "umt5"])
def test_position_biases_of_decoders(name: str, cache: str | None) -> None:
    """The prompts of encoder and decoder are padded; then come tokens one by one."""
    model, given = make_encoder(name, transformers.AutoModelForSeq2SeqLM), left_padded()
    start = (torch.arange(9) >= torch.tensor([0, 3, 5])[:, None]).long()
    options = {"attention_mask": given, "cache_implementation": cache, "disable_compile": True}
    options |= {"decoder_input_ids": make_tokens(3, 9, seed=6), "decoder_attention_mask": start}
    expected, actual = (
        generate(model, implementation, make_tokens(*given.shape), 12, **options)
        for implementation in ("eager", "cpattn")
    )
    assert torch.equal(actual.sequences, expected.sequences)
    assert_logits_close(torch.stack(actual.logits), torch.stack(expected.logits))


def mask_of(band: masks.Band, queries: int, keys: int) -> np.ndarray:
    position = np.arange(keys) - band.starts[:, None, None]
    length = band.kv_lens[:, None, None]
    visible = (position >= 0) & (position < length)
    own = length - queries + np.arange(queries)[:, None]
    if band.causal:
        visible = visible & (position <= own)
    if band.window is not None:
        left, right = band.window
        visible = visible & (position >= own - left) & (position <= own + right)
    return np.broadcast_to(visible, (len(band.starts), queries, keys))


SIZE = st.integers(1, 5)


@given(st.data(), SIZE, SIZE, st.integers(1, 9))
def test_every_band_is_found_and_nothing_else_is_one(
    data: Any, batch: int, queries: int, keys: int
) -> None:
    starts = data.draw(st.lists(st.integers(0, keys), min_size=batch, max_size=batch))
    causal = data.draw(st.booleans())
    side = st.integers(0, keys)
    window = data.draw(st.none() | st.tuples(side, st.just(0) if causal else side))
    lengths = np.array([data.draw(st.integers(0, keys - start)) for start in starts])
    visible = mask_of(masks.Band(np.array(starts), lengths, causal, window), queries, keys)
    found = masks.band_of(torch.from_numpy(visible.copy())[:, None])
    assert found is not None
    np.testing.assert_array_equal(mask_of(found, queries, keys), visible)
    flipped = visible.copy()
    flipped.flat[data.draw(st.integers(0, flipped.size - 1))] ^= True
    found = masks.band_of(torch.from_numpy(flipped)[:, None])
    assert found is None or np.array_equal(mask_of(found, queries, keys), flipped)
