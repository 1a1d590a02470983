# SPDX-License-Identifier: Apache-2.0
"""A call of each torch operator, and the result of the function with its name; operators of
torch.ops.npu get tensors and lists, as for torch_npu."""

from dataclasses import dataclass, field
from typing import Any

import torch

import cpattn
import cpattn.integrations.torch_ops
from cpattn.integrations import torch_npu
from support.cases import packed
from support.npu.fia_cases import LAYOUTS, TEMPLATE, FiaBatch
from support.npu.sparse_cases import FORMS, Batch, Case, Operator
from support.public_names import PUBLIC

OPERATORS = torch.ops.cpattn
ROWS, HEADS, KV_HEADS, DIM, PAGE = 10, 4, 2, 32, 4
LORA_RANK, KV_RANK, ROPE = 48, 32, 16


@dataclass(frozen=True)
class Call:
    """Arguments of an operator, and of the function if they differ."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    results: tuple[str, ...] = ("out",)
    library: str = "cpattn"
    label: str = ""

    def __str__(self) -> str:
        return self.name + self.label

    @property
    def packet(self) -> Any:
        return getattr(getattr(torch.ops, self.library), self.name)

    @property
    def operator(self) -> Any:
        return self.packet.default

    @property
    def out(self) -> Any:
        return self.packet.out

    @property
    def floats(self) -> list[int]:
        """Return positions of the tensors that could require a gradient."""
        tensors = [(i, x) for i, x in enumerate(self.args) if isinstance(x, torch.Tensor)]
        return [i for i, x in tensors if x.is_floating_point()]

    def function(self) -> tuple[torch.Tensor, ...]:
        kwargs = dict(self.kwargs)
        if self.library == "npu":
            return as_tuple(getattr(cpattn.npu, self.name)(*self.args, **kwargs))
        if self.name == "do_cp_attn_fia":
            keys = ("cp_rank", "cp_size", "strategy", "num_tokens", "weights")
            batch = {key: kwargs.pop(key) for key in keys if key in kwargs}
            batch["page_size"] = kwargs["page_size"] if kwargs.pop("whole_pages", False) else None
            batch |= {key: kwargs.pop(key) for key in ("extend_lens", "seq_lens")}
            kwargs["metadata"] = cpattn.build_cp_metadata(**batch)
        if self.results == ("out", "lse"):
            kwargs["return_lse"] = True
        if "window_right" in kwargs:
            right = kwargs.pop("window_right")
            kwargs["window"] = (kwargs.get("window"), None if right == -1 else right)
        for name in ("k_scale", "v_scale"):  # operators have an argument for each of two types
            if f"{name}s" in kwargs:
                kwargs[name] = kwargs.pop(f"{name}s")
        return as_tuple(PUBLIC[self.name](*self.args, **kwargs))

    def outputs(self) -> dict[str, torch.Tensor]:
        """Return tensors to write into, with wrong contents."""
        results = zip(self.results, self.function(), strict=True)
        return {name: torch.full_like(result, 3) for name, result in results}


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cp_attention_options(q, k_cache, v_cache, batch, rand) -> list[Call]:
    """Return calls with two sequences of 9 and 8 new tokens at the end of 16 and 11."""
    masks = rand(9 * 16 + 8 * 11) > 0
    bits = torch.from_numpy(packed([masks[: 9 * 16].numpy(), masks[9 * 16 :].numpy()]))
    options = {"window": 5, "softcap": 20.0, "sinks": rand(HEADS), "custom_mask": masks}
    latent = {"q_rope": rand(ROWS, HEADS * ROPE), "k_rope": rand(9, PAGE, KV_HEADS * ROPE)}
    latent |= {"v_head_dim": 16, "causal": False, "packed_custom_mask": bits}
    latent |= {"window": 5, "window_right": -1, "bias": rand(2, 1, 9, 16), "precise": True}
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
    csr = {"q_lens": q_lens, "kv_indptr": ints(0, 4, 7), "last_page_len": ints(4, 1)}
    csr["kv_indices"] = ints(5, 0, 7, 2, 8, 1, 3)
    options = {"window": 5, "softcap": 20.0, "sinks": rand(HEADS), "num_threads": 1}
    options["precise"] = True
    sides = {"window": 5, "window_right": 2, "causal": False, "bias": rand(1, HEADS, 7, 16)}
    sides |= {"alibi_slopes": rand(HEADS), "relative_bias": rand(HEADS, 5)}
    ranges = (ints(0, 0, 4), ints(5, 12, 9))
    indexer = (rand(3, 2, 16), rand(12, 16), rand(3, 2), *ranges)
    nope, rope = rand(6, 512), rand(6, 64)
    rows = cpattn.sparse.quantize_kv_rows(nope, rope)
    latent = (rand(3, HEADS, DIM), rand(20, 1, DIM), ints([[7, 19, -1]], [[0, 1, 2]], [[4, 4, 4]]))
    projection = (rand(5, LORA_RANK + KV_RANK + ROPE), rand(LORA_RANK), rand(KV_RANK))
    ranks = (LORA_RANK, KV_RANK, ROPE)
    fia = {"extend_lens": ints(9, 8), "seq_lens": ints(16, 11), "cp_rank": 1, "cp_size": 2}
    fia |= {"block_tables": tables, "page_size": PAGE, "num_heads": HEADS}
    fia |= {"num_kv_heads": KV_HEADS, "scale": None}
    narrow = (q.flatten(1), k_cache, v_cache[..., :16].contiguous())
    interleaved = fia | {"strategy": "interleave", "num_tokens": 18, "scale": 0.3}
    weighted = {"strategy": "contiguous", "weights": [2.0, 3.0], "whole_pages": True}
    weighted["cp_rank"] = 0
    biased = {"eps": 1e-3, "q_bias": rand(LORA_RANK), "kv_bias": rand(KV_RANK)}
    epsilons = {"q_eps": 1e-6, "kv_eps": 1e-5}
    attended, split = ("out", "lse"), ("q", "k_nope", "k_pe")
    sparse, with_sinks = ("out", "max_logits", "lse"), (0.2, 32, rand(HEADS), ints(3, 0, 1))
    # torch.library.opcheck multiplies its arguments, but torch cannot multiply float8.
    codes = [x.mul(30).to(torch.int8) for x in (k_cache, v_cache)]
    raw = [x.view(torch.uint8) for x in codes]
    numbers = {"k_scale": 0.5, "v_scale": 2.0}
    heads = {"k_scales": rand(KV_HEADS).abs(), "v_scales": rand(1).abs()}
    tokens = {f"{name}_scales": rand(9, PAGE, KV_HEADS).abs() for name in ("k", "v")}
    tokens |= {"kv_dtype": "int8"}
    return [
        Call("paged_attention", (q, k_cache, v_cache), paged, attended),
        Call("paged_attention", (q, k_cache, v_cache), paged | sides, attended),
        Call("paged_attention", (q, k_cache, v_cache), csr | options, attended),
        Call("do_cp_attn_fia", (q.flatten(1), k_cache, v_cache), fia, attended),
        Call("do_cp_attn_fia", narrow, interleaved, attended),
        Call("do_cp_attn_fia", narrow, fia | weighted, attended, label=" of ranks of other speed"),
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
        Call("flash_mla_sparse_fwd", (*latent, 0.2, 16), {}, sparse),
        Call("flash_mla_sparse_fwd", (*latent, *with_sinks), {"num_threads": 1}, sparse),
        Call("split_qk_norm", (*projection, *ranks), epsilons, (*split, "latent_cache")),
        Call("fused_split_qk_norm", (*projection, *ranks), {}, split),
        Call("fused_split_qk_norm", (*projection, *ranks), biased, split),
        Call("paged_attention", (q, *codes), paged | numbers, attended),
        Call("paged_attention", (q, *codes), paged | heads, attended),
        Call("paged_attention", (q, *raw), paged | tokens, attended),
        Call("do_cp_attn_fia", (q.flatten(1), *codes), fia | numbers, attended),
        Call("do_cp_attn_fia", (q.flatten(1), *raw), fia | tokens, attended),
    ]


torch_npu.install().remove()  # this registers the operators

SPARSE_CASES = [
    *(Case(), Case(layout_kv="TND"), Case(layout_query="BSND")),
    Case(layout_query="BSND", layout_kv="BSND", block=3, rope_dim=0),
]


def make_call(name: str, positional: str, arguments: dict[str, Any], label: str = "") -> Call:
    def convert(key: str, value: Any) -> Any:
        if key.startswith("actual_seq"):
            lengths = [int(x) for x in value]
            return lengths if "infer" in name else torch.tensor(lengths, dtype=torch.int32)
        return torch.from_numpy(value) if key == "block_table" and value is not None else value

    arguments = {key: convert(key, value) for key, value in arguments.items()}
    args = tuple(arguments.pop(key) for key in positional.split())
    return Call(name, args, arguments, library="npu", label=label)


def fia_call(layout: str, blocks: str | None, lse: bool) -> Call:
    batch = FiaBatch(layout, (5, 1, 7), (20, 17, 7), blocks=blocks, v_head_dim=48)
    arguments = batch.arguments(sparse_mode=3, atten_mask=TEMPLATE, softmax_lse_flag=lse)
    name, label = "npu_fused_infer_attention_score", f" {layout} {blocks} {lse}"
    return make_call(name, "query key value", arguments, label)


def indexer_call(form: tuple[str, str], value: bool) -> Call:
    arguments, label = Operator(form).arguments(return_value=value), f" {' '.join(form)} {value}"
    return make_call("npu_lightning_indexer", "query key weights", arguments, label)


def sparse_call(case: Case, lse: bool) -> Call:
    arguments = Batch(case, torch.float32).arguments(return_softmax_lse=lse)
    positional = "query key value sparse_indices scale_value"
    return make_call("npu_sparse_flash_attention", positional, arguments, f" {case} {lse}")


def decoding_calls() -> list[Call]:
    """Return calls as sglang decodes, with absorbed MLA and lengths in a tensor, and with int8."""
    name, where = "npu_fused_infer_attention_score", {"blocks": "H", "spare_rows": 0}
    latent = FiaBatch("BSND", (1, 1), (20, 33), num_kv_heads=1, rope_dim=16, **where)
    arguments = latent.arguments(antiquant_mode=0, antiquant_scale=None)
    arguments["value"] = arguments["key"]
    mla = make_call(name, "query key value", arguments, " of latents")
    mla.kwargs["actual_seq_lengths_kv"] = torch.tensor([20, 33], dtype=torch.int32)
    del mla.kwargs["actual_seq_lengths"]
    arguments = FiaBatch("BSND", (1, 1, 1), (20, 1, 33), **where).arguments()
    draw = torch.Generator().manual_seed(0)
    for side in ("key", "value"):
        codes = torch.randint(-128, 128, arguments[side].shape, generator=draw)
        arguments[side] = codes.to(torch.int8)
    numbers = torch.rand(2, 2, 2, 32, generator=draw)  # scales and offsets, [N, D] of K and V
    both = {"antiquant_scale": numbers[0], "antiquant_offset": numbers[1], "antiquant_mode": 0}
    apart = {
        f"{side}_antiquant_{kind}": numbers[i, j]
        for i, kind in enumerate(("scale", "offset"))
        for j, side in enumerate(("key", "value"))
    }
    labels = {" of codes": both, " of codes, numbers apart": apart}
    return [
        mla,
        *(make_call(name, "query key value", arguments | x, label) for label, x in labels.items()),
    ]


def npu_calls() -> list[Call]:
    return [
        *(
            fia_call(layout, blocks, lse)
            for layout in LAYOUTS
            for blocks, lse in ((None, True), ("H", False), ("N", True))
            if blocks != "N" or layout[:3] in ("BNS", "TND", "NTD")
        ),
        *decoding_calls(),
        *(indexer_call(form, value) for form in FORMS for value in (False, True)),
        *(sparse_call(case, lse) for case in SPARSE_CASES for lse in (False, True)),
    ]
