# SPDX-License-Identifier: Apache-2.0
"""Continuous batching of transformers on pages of its cache gives what single prompts give."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

from torch import Tensor  # noqa: E402
from transformers import ContinuousBatchingConfig, GenerationConfig  # noqa: E402
from transformers.generation.continuous_batching import continuous_api, model_runner  # noqa: E402
from transformers.generation.continuous_batching.cache_allocators import (  # noqa: E402
    FullAttentionCacheAllocator,
    SlidingAttentionCacheAllocator,
)

import cpattn.integrations.transformers as integration  # noqa: E402
from cpattn.integrations.transformers import paged  # noqa: E402
from support.cases import assert_attention, one_after_another  # noqa: E402
from support.transformers.over_ranks import NEW_TOKENS, PAGE, PROMPTS, alone  # noqa: E402
from support.transformers.tiny_transformers import (  # noqa: E402
    CACHE,
    WINDOW,
    make_model,
    make_tokens,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")
in_place = pytest.mark.skipif(CACHE == "cache", reason="transformers reads the cache itself")
SHORT = PROMPTS[4:6]


@pytest.fixture(
    scope="module", params=["llama", "llama of odd heads", "qwen3", "gemma2", "gpt_oss"]
)
def model(request: pytest.FixtureRequest) -> Any:
    return make_model(request.param)


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[int]]:
    return [alone(model, prompt) for prompt in PROMPTS]


def batched(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Return the tokens of continuous batching, up to 24 at once: long prompts come in chunks."""
    sizes = {"page_size": PAGE, "num_blocks": 64, "max_batch_tokens": 24}
    config = ContinuousBatchingConfig(**sizes)
    greedy = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    generation = GenerationConfig(max_new_tokens=NEW_TOKENS, **greedy)
    options = {"generation_config": generation, "continuous_batching_config": config}
    with integration.use_paged(model):
        results = model.generate_batch(prompts, **options)
    return [results[f"req_{i}"].generated_tokens for i in range(len(prompts))]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    seen = SimpleNamespace(plans=[], memory=set(), copies=0)

    def run(plan: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        seen.plans.append(plan)
        seen.memory |= {x.untyped_storage().data_ptr() for x in (k, v)}
        return original(plan, q, k, v, **options)

    original = paged.run_attention
    monkeypatch.setattr(paged, "run_attention", run)
    for allocator in (FullAttentionCacheAllocator, SlidingAttentionCacheAllocator):

        def update(*arguments: Any, of: Any = allocator.update) -> Any:
            seen.copies += 1
            return of(*arguments)

        monkeypatch.setattr(allocator, "update", update)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
def test_the_tokens_of_one_prompt_at_a_time(
    model: Any, expected: Any, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = model_runner.ModelRunner.__init__

    def start(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        self.pad_inputs = padded

    monkeypatch.setattr(model_runner.ModelRunner, "__init__", start)
    assert batched(model, PROMPTS) == expected
    assert len({token for tokens in expected for token in tokens}) > 5


@in_place
def test_full_attention_copies_nothing_and_shares_the_pages_of_a_prefix(calls: Any) -> None:
    model = make_model("llama")
    assert batched(model, PROMPTS) == [alone(model, prompt) for prompt in PROMPTS]
    assert calls.copies == 0
    assert len(calls.memory) == 1  # the memory of the cache
    assert len({id(plan) for plan in calls.plans}) == len(calls.plans) / 2  # two layers share one
    first_pages = [plan.page_ids[plan.page_indptr[:-1]].tolist() for plan in calls.plans]
    assert any(len(set(pages)) < len(pages) for pages in first_pages)


@in_place
@pytest.mark.slow
def test_a_sliding_window_decodes_in_place(calls: Any) -> None:
    batched(make_model("qwen3"), SHORT)
    assert NEW_TOKENS > WINDOW
    assert calls.copies == 0
    assert len(calls.memory) == 1


def test_no_kernel_of_the_hub_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers replaces only `cpattn` by a kernel of the hub, if it has one."""
    model, asked = make_model("llama"), []
    expected = [alone(model, prompt) for prompt in SHORT]
    monkeypatch.setattr(continuous_api, "is_flash_attn_3_available", lambda **_: True)
    monkeypatch.setattr(model, "set_attn_implementation", asked.append)
    assert batched(model, SHORT) == expected
    assert not asked
    model.config._attn_implementation = "cpattn"
    manager = SimpleNamespace()
    continuous_api.ContinuousBatchingManager.switch_to_cb_friendly_attn(manager, model)
    assert asked == ["flash_attention_3"]


FULL, SLIDING = (
    {"sliding_window": WINDOW, "layer_types": [f"{kind}_attention"]} for kind in ("full", "sliding")
)


@pytest.mark.parametrize(
    ("window", "config", "said"),
    [
        (None, {}, {}),
        (None, FULL, {"sliding_window": None}),
        (WINDOW, {}, {"sliding_window": WINDOW}),
        (WINDOW, {"sliding_window": WINDOW}, {}),
        (WINDOW, SLIDING, {}),
    ],
)
def test_keys_that_transformers_has_read(window: int | None, config: Any, said: Any) -> None:
    """Release 5.24 passes keys of all sequences, one after another, with padding at the end.

    Layers of PhiMoE leave the window to their config.
    """
    module = SimpleNamespace(config=SimpleNamespace(**config), layer_idx=0)
    q_lens, kv_lens, padding = [3, 1, 20], [15, 33, 20], 4
    torch.manual_seed(0)
    q = torch.randn(sum(q_lens) + padding, 4, 16)
    k, v = (torch.randn(sum(kv_lens) + padding, 2, 16) for _ in "kv")
    starts = {
        name: torch.tensor([0, *lens]).cumsum(0).int()
        for name, lens in (("cu_seq_lens_q", q_lens), ("cu_seq_lens_k", kv_lens))
    }
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    out, _ = paged.paged_attention_forward(
        module, *heads_first, None, **starts, **said, scaling=0.25
    )
    rows = sum(q_lens)
    assert not out[0, rows:].any()
    asked = {"scale": 0.25, "window": window and window - 1}
    inputs = one_after_another(q[:rows], k, v, q_lens, kv_lens, **asked)
    assert_attention(out[0, :rows], None, inputs)


def test_a_mask_of_a_layer_is_refused() -> None:
    """Doge makes such a mask, which has weights of keys, or hides some."""
    tensors, options = [torch.zeros(1, 1, 3, 16)] * 3, {"cache": object()}
    with pytest.raises(ValueError, match="attention_mask must be None in continuous batching"):
        paged.paged_attention_forward(None, *tensors, torch.zeros(1, 1, 3, 3), **options)


def test_use_paged_ends_and_holds_for_batches_alone() -> None:
    model = make_model("llama")
    before = model.config._attn_implementation
    with integration.use_paged(model):
        assert model.config._attn_implementation == "cpattn_flash"
        with torch.inference_mode(), pytest.raises(ValueError, match="that of generate_batch"):
            model(make_tokens(1, 3))
    assert model.config._attn_implementation == before
