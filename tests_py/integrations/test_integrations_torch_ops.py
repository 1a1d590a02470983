# SPDX-License-Identifier: Apache-2.0
"""The operators of torch: what torch asks of operators, and equality with the functions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import cpattn
import cpattn.integrations.torch_ops
from support.cases import packed
from support.public_names import PUBLIC

pytestmark = pytest.mark.slow


OPERATORS = torch.ops.cpattn
ROWS, HEADS, KV_HEADS, DIM, PAGE = 10, 4, 2, 32, 4
LORA_RANK, KV_RANK, ROPE = 48, 32, 16


@dataclass(frozen=True)
class Call:
    """Arguments of an operator, and of the function where they are others."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    results: tuple[str, ...] = ("out",)

    def __str__(self) -> str:
        return self.name

    @property
    def operator(self) -> Any:
        return getattr(OPERATORS, self.name).default

    @property
    def out(self) -> Any:
        return getattr(OPERATORS, self.name).out

    @property
    def floats(self) -> list[int]:
        """Positions of the tensors that could require a gradient."""
        tensors = [(i, x) for i, x in enumerate(self.args) if isinstance(x, torch.Tensor)]
        return [i for i, x in tensors if x.is_floating_point()]

    def function(self) -> tuple[torch.Tensor, ...]:
        """What the function of the same name gives."""
        kwargs = dict(self.kwargs)
        if self.name == "do_cp_attn_fia":
            keys = ("cp_rank", "cp_size", "strategy", "num_tokens")
            batch = {key: kwargs.pop(key) for key in keys if key in kwargs}
            batch |= {key: kwargs.pop(key) for key in ("extend_lens", "seq_lens")}
            kwargs["metadata"] = cpattn.build_cp_metadata(**batch)
        if self.results == ("out", "lse"):
            kwargs["return_lse"] = True
        return as_tuple(PUBLIC[self.name](*self.args, **kwargs))

    def outputs(self) -> dict[str, torch.Tensor]:
        """Tensors to write into, whose contents are wrong."""
        results = zip(self.results, self.function(), strict=True)
        return {name: torch.full_like(result, 3) for name, result in results}


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cp_attention_options(q, k_cache, v_cache, batch, rand) -> list[Call]:
    """Two sequences of 9 and 8 new tokens at the end of 16 and 11."""
    masks = rand(9 * 16 + 8 * 11) > 0
    bits = torch.from_numpy(packed([masks[: 9 * 16].numpy(), masks[9 * 16 :].numpy()]))
    options = {"window": 5, "softcap": 20.0, "sinks": rand(HEADS), "custom_mask": masks}
    latent = {"q_rope": rand(ROWS, HEADS * ROPE), "k_rope": rand(9, PAGE, KV_HEADS * ROPE)}
    latent |= {"v_head_dim": 16, "causal": False, "packed_custom_mask": bits}
    results = ("out", "lse")
    return [
        Call("do_cp_attn_fia", (q.flatten(1), k_cache, v_cache), batch | options, results),
        Call("do_cp_attn_fia", (q.flatten(1), k_cache, None), batch | latent, results),
    ]


def calls() -> list[Call]:
    draw = torch.Generator().manual_seed(3)

    def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    q, k_cache, v_cache = rand(ROWS, HEADS, DIM), *rand(2, 9, PAGE, KV_HEADS, DIM)
    tables, q_lens, kv_lens = ints([5, 0, 7, 2], [8, 1, 3, 4]), ints(7, 3), ints(16, 9)
    paged = {"q_lens": q_lens, "kv_lens": kv_lens, "block_tables": tables}
    csr = {
        "q_lens": q_lens,
        "kv_indptr": ints(0, 4, 7),
        "kv_indices": ints(5, 0, 7, 2, 8, 1, 3),
        "last_page_len": ints(4, 1),
    }
    options = {"window": 5, "softcap": 20.0, "sinks": rand(HEADS), "num_threads": 1}
    ranges = (ints(0, 0, 4), ints(5, 12, 9))
    indexer = (rand(3, 2, 16), rand(12, 16), rand(3, 2), *ranges)
    nope, rope = rand(6, 512), rand(6, 64)
    rows = cpattn.sparse.quantize_kv_rows(nope, rope)
    latent = (rand(3, HEADS, DIM), rand(20, 1, DIM), ints([[7, 19, -1]], [[0, 1, 2]], [[4, 4, 4]]))
    projection = (rand(5, LORA_RANK + KV_RANK + ROPE), rand(LORA_RANK), rand(KV_RANK))
    ranks = (LORA_RANK, KV_RANK, ROPE)
    fia = {
        "extend_lens": ints(9, 8),
        "seq_lens": ints(16, 11),
        "cp_rank": 1,
        "cp_size": 2,
        "block_tables": tables,
        "page_size": PAGE,
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "scale": None,
    }
    split = ("q", "k_nope", "k_pe")
    return [
        Call("paged_attention", (q, k_cache, v_cache), paged, ("out", "lse")),
        Call("paged_attention", (q, k_cache, v_cache), csr | options, ("out", "lse")),
        Call("do_cp_attn_fia", (q.flatten(1), k_cache, v_cache), fia, ("out", "lse")),
        Call(
            "do_cp_attn_fia",
            (q.flatten(1), k_cache, v_cache[..., :16].contiguous()),
            fia | {"strategy": "interleave", "num_tokens": 18, "scale": 0.3},
            ("out", "lse"),
        ),
        *cp_attention_options(q, k_cache, v_cache, fia, rand),
        Call("indexer_logits", indexer),
        Call("indexer_logits", indexer, {"k_scale": rand(12).abs()}),
        Call("indexer_topk", indexer, {"topk": 4}),
        Call("indexer_topk", indexer, {"topk": 4, "k_scale": rand(12).abs(), "sorted": False}),
        Call("fast_topk", (rand(3, 20), ints(20, 2, 9), 5)),
        Call("fast_topk", (rand(3, 20), ints(8, 2, 9), 5, ints(3, 0, 11)), {"sorted": False}),
        Call("hadamard_transform", (rand(2, 3, 64, dtype=torch.bfloat16),)),
        Call("hadamard_transform", (rand(64), 1.0)),
        Call("quantize_kv_rows", (nope, rope)),
        Call("dequantize_kv_rows", (rows,)),
        Call("dequantize_kv_rows", (rows, ints(5, 0, 5))),
        Call("flash_mla_sparse_fwd", (*latent, 0.2, 16), {}, ("out", "max_logits", "lse")),
        Call(
            "flash_mla_sparse_fwd",
            (*latent, 0.2, 32, rand(HEADS), ints(3, 0, 1)),
            {"num_threads": 1},
            ("out", "max_logits", "lse"),
        ),
        Call(
            "split_qk_norm",
            (*projection, *ranks),
            {"q_eps": 1e-6, "kv_eps": 1e-5},
            (*split, "latent_cache"),
        ),
        Call("fused_split_qk_norm", (*projection, *ranks), {}, split),
        Call(
            "fused_split_qk_norm",
            (*projection, *ranks),
            {"eps": 1e-3, "q_bias": rand(LORA_RANK), "kv_bias": rand(KV_RANK)},
            split,
        ),
    ]


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """Compiled functions count by their code, which tests with parameters share."""
    torch.compiler.reset()


CALLS = calls()
FIRST_OF_EACH = list({call.name: call for call in reversed(CALLS)}.values())
every_call = pytest.mark.parametrize("call", CALLS, ids=str)
every_operator = pytest.mark.parametrize("call", FIRST_OF_EACH, ids=str)


def assert_same(results: Any, expected: Any) -> None:
    for result, wanted in zip(as_tuple(results), as_tuple(expected), strict=True):
        torch.testing.assert_close(result, wanted, rtol=0, atol=0)


def states() -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(4)
    outs, lses = torch.randn(2, 5, 3, 16, generator=draw), torch.randn(2, 5, 3, generator=draw)
    return outs[0].clone(), lses[0].clone(), outs[1].clone(), lses[1].clone()


def test_all_operators_are_tested():
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("cpattn::")}
    tested = {f"cpattn::{call.name}{out}" for call in CALLS for out in ("", ".out")}
    assert names == tested | {"cpattn::merge_state"}


@every_call
def test_equals_the_function(call):
    assert_same(call.operator(*call.args, **call.kwargs), call.function())


@every_call
def test_out(call):
    outputs = call.outputs()
    assert call.out(*call.args, **call.kwargs, **outputs) is None
    assert_same(tuple(outputs.values()), call.function())


def test_merge_state():
    parts, expected = states(), states()
    OPERATORS.merge_state(*parts)
    cpattn.merge_state(*expected)
    assert_same(parts, expected)


@every_call
def test_opcheck(call):
    torch.library.opcheck(call.operator, call.args, call.kwargs)


@every_operator
def test_opcheck_of_out(call):
    torch.library.opcheck(call.out, call.args, call.kwargs | call.outputs())


def test_opcheck_of_merge_state():
    torch.library.opcheck(OPERATORS.merge_state.default, states())


@every_operator
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_to_one_graph(call, backend):
    def run(*args, **kwargs):
        outputs = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
        operator = getattr(OPERATORS, call.name)
        operator(*args, **kwargs, **outputs)
        return as_tuple(operator(*args, **kwargs)), tuple(outputs.values())

    expected = call.outputs()
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    returned, written = compiled(*call.args, **call.kwargs)
    assert_same(returned, call.function())
    assert_same(written, call.function())


def test_merging_compiles_to_one_graph():
    def run(out_a, lse_a, out_b, lse_b):
        out = out_a + 0
        OPERATORS.merge_state(out, lse_a, out_b, lse_b)
        return 2 * out

    parts, expected = states(), states()
    result = torch.compile(run, fullgraph=True, backend="aot_eager")(*parts)
    assert_same(parts[0], expected[0])
    cpattn.merge_state(*expected)
    assert_same((result, parts[1]), (2 * expected[0], expected[1]))


def test_one_graph_serves_all_lengths():
    """Lengths and tables are data; numbers of tokens and of sequences are symbols."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    call = CALLS[0]
    _, k_cache, v_cache = call.args
    compiled = torch.compile(
        lambda q, *args: OPERATORS.paged_attention(
            q, k_cache, v_cache, q_lens=args[0], kv_lens=args[1], block_tables=args[2]
        ),
        fullgraph=True,
        backend=backend,
        dynamic=True,
    )
    tables = call.kwargs["block_tables"]
    for lens in ([7, 1, 2], [2, 4], [3, 1, 5, 6]):
        q, q_lens = torch.randn(sum(lens), HEADS, DIM), ints(*lens)
        args = (q_lens, q_lens + 2, tables[[i % 2 for i in range(len(lens))]])
        names = ("q_lens", "kv_lens", "block_tables")
        options = dict(zip(names, args, strict=True))
        expected = cpattn.paged_attention(q, k_cache, v_cache, **options, return_lse=True)
        assert_same(compiled(q, *args), expected)
    assert len(graphs) == 1


@every_operator
def test_inference_mode(call):
    with torch.inference_mode():
        result = call.operator(*call.args, **call.kwargs)
        outputs = call.outputs()
        call.out(*call.args, **call.kwargs, **outputs)
    expected = call.function()
    assert_same(result, expected)
    assert_same(tuple(outputs.values()), expected)
    # A tensor of inference mode is as good outside of it.
    call.out(*call.args, **call.kwargs, **outputs)
    assert_same(tuple(outputs.values()), expected)


@every_operator
def test_meta_tensors(call):
    """Shapes and dtypes without numbers."""

    def meta(value):
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    args, kwargs = map(meta, call.args), {name: meta(x) for name, x in call.kwargs.items()}
    results = as_tuple(call.operator(*args, **kwargs))
    for result, expected in zip(results, call.function(), strict=True):
        assert result.device.type == "meta"
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
        assert result.stride() == expected.stride()


@pytest.mark.parametrize("call", [call for call in FIRST_OF_EACH if call.floats], ids=str)
def test_gradients_are_refused(call):
    position = call.floats[-1]
    name = call.operator._schema.arguments[position].name
    args = list(call.args)
    args[position] = args[position].clone().requires_grad_()
    message = f"{call.name}: cpattn operators have no backward: {name} requires a gradient"
    with pytest.raises(TypeError, match=message):
        call.operator(*args, **call.kwargs)
    with pytest.raises(TypeError, match=message):
        call.out(*args, **call.kwargs, **call.outputs())
    with torch.no_grad():
        results = as_tuple(call.operator(*args, **call.kwargs))
    assert_same(results, call.function())
    assert not any(result.requires_grad for result in results)


def test_gradients_of_keywords_are_refused():
    call = CALLS[1]
    kwargs = call.kwargs | {"sinks": torch.zeros(HEADS, requires_grad=True)}
    with pytest.raises(TypeError, match="have no backward: sinks requires a gradient"):
        call.operator(*call.args, **kwargs)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_are_refused_while_compiling(backend):
    x = torch.randn(4, 64, requires_grad=True)
    compiled = torch.compile(OPERATORS.hadamard_transform, fullgraph=True, backend=backend)
    with pytest.raises(Exception, match="cpattn operators have no backward: x requires"):
        compiled(x)


def test_autograd_sees_what_was_overwritten():
    weight, out = torch.ones(64, requires_grad=True), torch.ones(64)
    product = (weight * out).sum()
    OPERATORS.hadamard_transform(torch.ones(64), out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_negated_views():
    """They are not what their memory says; torch makes plain tensors of them."""
    x = torch.complex(torch.zeros(64), torch.randn(64)).conj().imag
    assert x.is_neg()
    expected = cpattn.sparse.hadamard_transform(x.resolve_neg())
    assert_same(OPERATORS.hadamard_transform(x), expected)


def test_errors_are_those_of_the_function():
    call = CALLS[0]
    with pytest.raises(ValueError, match="paged_attention: block_tables must have"):
        call.operator(*call.args, **call.kwargs | {"kv_lens": ints(16, 90)})
    score, lengths, topk = next(call for call in CALLS if call.name == "fast_topk").args
    with pytest.raises(ValueError, match="fast_topk"):
        OPERATORS.fast_topk.out(
            score, lengths, topk, out=torch.empty(3, topk + 1, dtype=torch.int32)
        )


@every_operator
def test_outputs_of_another_shape_are_refused(call):
    wrong = {name: torch.cat([x, x], -1) for name, x in call.outputs().items()}
    with pytest.raises(ValueError, match=call.name):
        call.out(*call.args, **call.kwargs, **wrong)
