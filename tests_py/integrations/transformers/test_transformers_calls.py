# SPDX-License-Identifier: Apache-2.0
"""Single calls of the attention function for transformers: refusals, layouts, forms of masks."""

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AutoModel, BloomConfig, MptConfig  # noqa: E402

import cpattn.integrations.transformers as integration  # noqa: E402
from cpattn.integrations.transformers import masks  # noqa: E402
from support.cases import DTYPES, assert_attention  # noqa: E402
from support.tolerances import assert_similar  # noqa: E402
from support.transformers.tiny_transformers import make_tokens  # noqa: E402

integration.register()


def call(**changes: Any) -> Any:
    torch.manual_seed(7)
    shapes = {"query": (2, 4, 3, 16), "key": (2, 2, 5, 16), "value": (2, 2, 5, 16)}
    arguments: dict[str, Any] = {name: torch.randn(shape) for name, shape in shapes.items()}
    arguments["attention_mask"] = None
    return integration.attention(torch.nn.Identity(), **arguments | changes)


SPARSE = {"indices": torch.zeros(2, 3, 1).int(), "scaling": 1.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.randn(2, 4, 3, 16, requires_grad=True)}, "no backward pass; run the mode"),
        ({"dropout": 0.1}, "dropout must be 0, call model.eval"),
        ({"position_bias": torch.zeros(4, 3, 5, requires_grad=True)}, "no backward pass"),
        ({"position_bias": torch.zeros(4, 3, 5)}, r"position_bias must have shape \[2, 4, 3, 5\]"),
        ({"position_bias": torch.zeros(1, 4, 3, 1)}, r"\[2, 4, 3, 5\], got \[1, 4, 3, 1\]"),
        ({"output_attentions": True}, "output_attentions is not supported"),
        ({"sinks": torch.zeros(2, 4, 3, 1)}, "sinks is not supported"),
        ({"block_indices": torch.zeros(2, 3, 1).int()}, "block_indices is not supported"),
        ({"key": torch.randn(1, 2, 5, 16)}, "key must have the batch of query, 2, got 1"),
        ({"attention_mask": torch.ones(2, 4, 3, 5).bool()}, r"\[2, 1, 3, 5\], got \[2, 4, 3, 5\]"),
        ({"attention_mask": torch.ones(2, 5).bool()}, r"\[2, 1, 3, 5\], got \[2, 5\]"),
        ({"attention_mask": torch.randn(2, 2, 3, 5)}, r"\[2, 4, 3, 5\], got \[2, 2, 3, 5\]"),
        ({"attention_mask": torch.ones(2, 1, 3, 5).int()}, "be bool or a float, got torch.int32"),
        (SPARSE | {"attention_mask": torch.randn(2, 1, 3, 5)}, "sparse attention has no bias"),
        (SPARSE | {"position_bias": torch.zeros(1)}, "position_bias is not supported"),
        ({"query": torch.randn(2, 4, 3, 592), "scaling": 1.0}, r"head_dim must be in \[1, 576\], "),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**changes)


def heads_last(batch: int, heads: int, queries: int, keys: int) -> Any:
    """Return a bias with the memory order of T5."""
    return torch.randn(batch, queries, keys, heads).permute(0, 3, 1, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 4, 3, 5), (1, 4, 1, 5), (2, 1, 3, 5), (1, 1, 3, 5)])
@pytest.mark.parametrize("beside", [False, True])
def test_a_mask_of_numbers_is_a_bias(shape: Any, beside: bool, dtype: str) -> None:
    """The lowest number hides a key like -inf, and a row with no other number sees no key."""
    torch.manual_seed(8)
    kind = getattr(torch, dtype)
    tensors = {"query": (2, 4, 3, 16), "key": (2, 2, 5, 16), "value": (2, 2, 5, 16)}
    q, k, v = arguments = [torch.randn(sizes).to(kind) for sizes in tensors.values()]
    mask = torch.randn(shape).to(kind)
    mask[..., 1], mask[..., 3] = torch.finfo(kind).min, -torch.inf
    mask[0, 0, 0] = torch.finfo(kind).min
    position_bias = heads_last(1, 4, 3, 5).to(kind) if beside else None
    bias = mask if position_bias is None else mask + position_bias
    bias = bias.float().masked_fill(mask < torch.finfo(kind).min / 2, -torch.inf)
    options = {"scaling": 0.25, "softcap": 2.0, "position_bias": position_bias}
    out, _ = call(**dict(zip(tensors, arguments, strict=True)), attention_mask=mask, **options)
    inputs = {"q": q.transpose(1, 2).flatten(0, 1), "k_cache": k, "v_cache": v, "kv_layout": "HND"}
    inputs |= {"q_lens": [3, 3], "kv_lens": [5, 5], "block_tables": [[0], [1]], "bias": bias}
    inputs |= {"scale": 0.25, "softcap": 2.0, "causal": False}
    assert_attention(out.flatten(0, 1), None, inputs)
    assert not out[0, 0, 0].any()


LAYOUTS = {
    "contiguous": lambda: torch.randn(3, 2, 9, 16),
    "tokens first": lambda: torch.randn(3, 9, 2, 16).transpose(1, 2),
    "part of a cache": lambda: torch.randn(3, 2, 14, 16)[:, :, 2:11],
    "columns of a tensor": lambda: torch.randn(3, 2, 9, 40)[..., 3:19],
    "one for the batch": lambda: torch.randn(1, 2, 9, 16).expand(3, -1, -1, -1),
    "no whole number of tokens apart": lambda: torch.randn(3, 300)[:, :288].view(3, 2, 9, 16),
    "last dimension apart": lambda: torch.randn(3, 2, 16, 9).mT,
}


@pytest.mark.parametrize(
    ("keys", "values"), [*zip(LAYOUTS, LAYOUTS, strict=True), *itertools.pairwise(LAYOUTS)]
)
def test_padding_in_any_layout(keys: str, values: str) -> None:
    torch.manual_seed(6)
    padding = torch.arange(9) >= torch.tensor([4, 0, 7])[:, None]
    mask = masks.visibility_mask(3, 5, 9, 4, 0, attention_mask=padding)
    arguments = {"key": LAYOUTS[keys](), "value": LAYOUTS[values]()}
    arguments |= {"query": torch.randn(3, 4, 5, 16), "position_bias": heads_last(1, 4, 5, 9)}
    actual, _ = call(**arguments, attention_mask=mask)
    expected, _ = call(**arguments, attention_mask=mask.clone())  # a clone has no band
    assert_similar(actual, expected)


def test_one_row_of_a_mask_for_all_queries() -> None:
    mask = torch.tensor([True, False, True, True, False]).expand(2, 1, 1, -1)
    expected, _ = call(attention_mask=mask.expand(-1, -1, 3, -1))
    actual, _ = call(attention_mask=mask)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("config", [BloomConfig, MptConfig])
def test_a_model_that_calls_no_attention_function(config: Any) -> None:
    """Such a model accepts the name, and would see all keys with None as its mask."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "n_layer": 1, "n_layers": 1}
    small = config(**sizes, n_head=4, n_heads=4)
    model = AutoModel.from_config(small, attn_implementation="cpattn")
    with torch.inference_mode(), pytest.raises(ValueError, match=r"for (Bloom|Mpt)Model"):
        model(make_tokens(1, 3))
    with pytest.raises(ValueError, match="must support attention functions"):
        integration.use_paged(model)


def test_windows_without_a_mask() -> None:
    query, key = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 9, 16)
    mask = torch.ones(3, 9).bool().tril(6).triu(6 - 3)[None, None]
    arguments = {"query": query, "key": key, "value": key, "position_bias": heads_last(1, 4, 3, 9)}
    expected, _ = call(**arguments, attention_mask=mask)
    actual, _ = call(**arguments, sliding_window=4)
    assert_similar(actual, expected)
