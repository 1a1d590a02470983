# SPDX-License-Identifier: Apache-2.0
"""Whole models of transformers, compiled and exported, have our attention in their graphs."""

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounter  # noqa: E402
from torch.export import Dim  # noqa: E402
from transformers import AutoModel, AutoModelForTextEncoding, BloomConfig  # noqa: E402

import cpattn.integrations.transformers as integration  # noqa: E402
from cpattn.integrations.transformers import masks  # noqa: E402
from support.tolerances import assert_logits_close  # noqa: E402
from support.transformers.tiny_transformers import (  # noqa: E402
    CONFIGS,
    generate,
    make_encoder,
    make_model,
    make_tokens,
)

pytestmark = [pytest.mark.usefixtures("one_torch_thread"), pytest.mark.slow]
LENGTH = 30
TOKENS = make_tokens(2, LENGTH)
PADDED = (torch.arange(LENGTH) >= torch.tensor([0, 7])[:, None]).long()

integration.register()
attend = torch.ops.cpattn_transformers.attend.default
bands_of = torch.ops.cpattn_transformers.bands_of.default


@pytest.fixture(autouse=True)
def no_graphs_of_others() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():  # torch.export has no inference mode
        yield
    torch._dynamo.reset()


def model_of(name: str) -> Any:
    model = make_model(name)
    model.set_attn_implementation("cpattn")
    return model


CALLS: dict[str, dict[str, Any]] = {
    "no mask": {},
    "padded": {"attention_mask": PADDED},
    "no cache": {"use_cache": False},
}


@pytest.mark.parametrize(("name", "call"), [*zip(CONFIGS, cycle(CALLS), strict=False)])
def test_one_graph_with_the_bits_of_the_model(name: str, call: str, monkeypatch: Any) -> None:
    """Masks are a few numbers, so layers need not read a byte for each query and key."""
    model, backend = model_of(name), AotEagerAndRecordGraphs()
    monkeypatch.setattr(masks, "visible_keys", None)
    assert_compiled_alike(model, backend, **CALLS[call])
    (graph,) = backend.graphs
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert called.count(torch.ops.cpattn_transformers.attend) == model.config.num_hidden_layers


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch calls it
def test_the_default_backend() -> None:
    """The rest of the model is computed in another order, so bits differ."""
    model = model_of("llama")
    model.config.num_hidden_layers = 1  # compiling takes most of the time
    expected = model(TOKENS, attention_mask=PADDED).logits
    actual = torch.compile(model, fullgraph=True)(TOKENS, attention_mask=PADDED).logits
    assert_logits_close(actual[PADDED.bool()], expected[PADDED.bool()])


def assert_compiled_alike(model: Any, backend: Any = "aot_eager", **options: Any) -> Any:
    """Check that one graph gives the bits of the model; return the compiled model and result."""
    expected = model(TOKENS, **options)[0]
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert torch.equal(compiled(TOKENS, **options)[0], expected)
    return compiled, expected


def test_a_mask_with_gaps_is_used_as_it_is() -> None:
    model, gaps = model_of("llama"), PADDED.clone()
    gaps[:, 10:13] = 0
    compiled, expected = assert_compiled_alike(model, attention_mask=gaps)
    assert not torch.equal(compiled(TOKENS, attention_mask=PADDED).logits, expected)


def test_one_graph_for_all_lengths() -> None:
    model, backend = model_of("qwen3"), CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    for length in (11, 17, 23, 29):
        arguments = TOKENS[:, :length], PADDED[:, :length]
        expected = model(*arguments, use_cache=False).logits
        assert torch.equal(compiled(*arguments, use_cache=False).logits, expected)
    assert backend.frame_count == 1


@pytest.mark.parametrize("cache", [None, "static"])
def test_generating_with_a_compiled_forward(cache: str | None) -> None:
    """Masks for static caches are made outside of the graph, masks for other caches inside."""
    options = {"attention_mask": PADDED, "cache_implementation": cache}
    expected = generate(make_model("qwen3"), "cpattn", TOKENS, 8, **options).sequences
    model = make_model("qwen3")
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    assert torch.equal(generate(model, "cpattn", TOKENS, 8, **options).sequences, expected)


def test_latents_in_one_graph() -> None:
    model = model_of("deepseek_v3")
    with integration.absorb_mla(model):
        assert_compiled_alike(model, attention_mask=PADDED)


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_an_encoder_in_one_graph(name: str) -> None:
    """The encoder of T5 has position biases."""
    model = make_encoder(name, AutoModelForTextEncoding)
    model.set_attn_implementation("cpattn")
    assert_compiled_alike(model, attention_mask=PADDED)


# Tracing changes transformers' list of collected outputs, and changes it back.
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")
@pytest.mark.parametrize("strict", [True, False])
def test_exported_models(strict: bool, tmp_path: Path) -> None:
    """Models are right for any batch and length, in this process and from a file."""
    model = model_of("qwen3")
    sizes = {0: Dim("batch", min=2, max=8), 1: Dim("length", min=4, max=512)}
    given = {"input_ids": TOKENS, "attention_mask": PADDED, "use_cache": False}
    shapes = {"input_ids": sizes, "attention_mask": sizes, "use_cache": None}
    exported = torch.export.export(model, (), given, dynamic_shapes=shapes, strict=strict)
    called = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert called.count(attend) == 2
    assert called.count(bands_of) == 2  # full and sliding layers have one each
    torch.export.save(exported, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    for rows, columns in ((2, LENGTH), (2, 12), (5, 17)):
        tokens = make_tokens(rows, columns)
        mask = torch.ones_like(tokens)
        mask[1, :5] = 0
        expected = model(tokens, attention_mask=mask, use_cache=False).logits
        for program in (exported, loaded):
            module = program.module()
            result = module(input_ids=tokens, attention_mask=mask, use_cache=False)
            assert torch.equal(result.logits, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch looks
def test_refusals_of_compiled_models() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 64, "n_layer": 1, "n_head": 4}
    bloom = AutoModel.from_config(BloomConfig(**sizes), attn_implementation="cpattn")
    with pytest.raises(ValueError, match="must support attention functions"):
        torch.compile(bloom, backend="eager")(TOKENS)
    model = model_of("llama")
    with torch.enable_grad(), pytest.raises(ValueError, match="no backward pass"):
        torch.compile(model, backend="eager")(TOKENS)
