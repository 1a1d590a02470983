# SPDX-License-Identifier: Apache-2.0
"""A good call of every public function, and what may not stand for each of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch

import cpattn
from cpattn import ForwardMode, TopkTransformMethod, reference


class Opaque:
    """Nothing that any function takes."""

    def __repr__(self) -> str:
        return "x" * 10_000  # which no message may contain


class Nameless:
    """Raises whatever it is asked."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("no attributes")

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __index__(self) -> int:
        raise RuntimeError("no number")

    def __float__(self) -> float:
        raise RuntimeError("no number")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth value")


NOTHING = [Opaque(), Nameless(), object, {}, {1, 2}, b"bytes", 1 + 2j]
ARRAYS = [np.ones(2, np.float32), torch.ones(2), np.ma.array([1.0, 2.0], mask=[True, False])]

# Kind: what is wrong, beside None where it is not optional.
WRONG: dict[str, list[Any]] = {
    "int": [*NOTHING, *ARRAYS, "16", 16.0, True, np.True_, np.float32(2), [16], 2**70],
    "float": [*NOTHING, *ARRAYS, "0.5", True, np.True_, [0.5], 10**400],
    "flag": [*NOTHING, *ARRAYS, "yes", 1, 0, 1.0, []],
    "text": [*NOTHING, *ARRAYS, 1, 1.5, True, ["NHD"], "nonsense", "\ud800"],
    "value": [*NOTHING, *ARRAYS, "x", 1, True, []],
    "nothing": [*ARRAYS, "x", 1, True],
    "ints": [
        *[*NOTHING, *ARRAYS, "12", 1, 1.5, True, memoryview(b"12"), range(2)],
        *[[1.5, 2], [True, 2], ["1"], [None, 1], [[1], [2]], [2**70, 1]],
        *[np.ones((1, 1), np.int64), np.array([1, 2], np.uint16), np.array(["a"])],
        *[np.array([1, 2], ">i4"), np.array([1, 2])[::-1], np.ma.array([1, 2])],
        torch.ones(2, dtype=torch.int64, device="meta"),
    ],
    "table": [
        *[*NOTHING, *ARRAYS, "12", 1, 1.5, True, [1, 2], [[1.5]], [[True]], [["1"]], [[None]]],
        *[[[2**70]], [1, [2]], np.ones(3, np.int64), np.ones((1, 1, 1), np.int64)],
        *[np.ones((2, 2), np.uint16), np.ones((2, 2), ">i4"), np.ma.ones((2, 2), np.int64)],
        *[np.ones((2, 2), np.int64)[::-1], torch.ones((2, 2), dtype=torch.int32, device="meta")],
    ],
}


def wrong_tensors(good: np.ndarray[Any, Any]) -> Iterator[Any]:
    """What may not stand for a tensor that is good."""
    yield from [*NOTHING, "x", 1, 1.5, True, [1.0], [[1.0]], memoryview(b"1234")]
    yield np.ma.array(good)
    yield np.array(["a"])
    yield np.array([None])
    yield good.astype(np.complex64)
    yield np.zeros(good.shape, np.uint16)
    yield np.zeros(good.shape, np.float32).astype(">f4")
    yield np.zeros((2,) * 7, good.dtype)
    yield np.zeros((2, *good.shape[1:]), good.dtype)[::-1]
    whole = torch.from_numpy(np.zeros(good.shape, np.float32))
    yield whole.to(torch.complex64)
    yield torch.empty(good.shape, device="meta")
    yield whole.to_sparse()
    yield whole.requires_grad_()


@dataclass
class Call:
    """A function with good arguments, by name: (kind, value)."""

    function: Callable[..., Any]
    arguments: dict[str, tuple[str, Any]]
    name: str = ""  # as errors begin

    def __post_init__(self) -> None:
        self.name = self.name or self.function.__name__

    def values(self) -> dict[str, Any]:
        return {name: value for name, (_, value) in self.arguments.items()}

    def wrong(self) -> Iterator[tuple[str, Any]]:
        """Every argument in turn, with everything that is wrong for it."""
        for name, (kind, value) in self.arguments.items():
            optional = kind.startswith("?")
            kind = kind.removeprefix("?")
            if kind == "any":
                continue
            if not optional:
                yield name, None
            yield from ((name, bad) for bad in WRONG.get(kind, ()) if bad is not None)
            if kind in ("tensor", "output"):
                yield from ((name, bad) for bad in wrong_tensors(value))
            if kind == "output":
                read_only = value.copy()
                read_only.flags.writeable = False
                yield name, read_only
                yield name, np.broadcast_to(np.zeros((), value.dtype), value.shape)


def f32(*shape: int) -> np.ndarray[Any, Any]:
    return np.ones(shape, np.float32)


def i32(*rows: Any) -> np.ndarray[Any, Any]:
    return np.array(rows, np.int32)


METADATA = cpattn.build_cp_metadata([4, 4], [7, 4], cp_rank=0, cp_size=2)
BARE_METADATA = cpattn.build_cp_metadata(
    [4, 4], [7, 4], cp_rank=0, cp_size=2, kv_len_convention="bare"
)
PLAN = cpattn.plan_attention(
    q_lens=[3], kv_lens=[10], block_tables=[[2, 0]], page_size=8, num_pages=4, num_heads=2,
    num_kv_heads=1, head_dim=16,
)  # fmt: skip

LAYER = {
    "q": ("tensor", f32(3, 2, 16)),
    "k_cache": ("tensor", f32(4, 8, 1, 16)),
    "v_cache": ("tensor", f32(4, 8, 1, 16)),
}
OPTIONS = {
    "kv_layout": ("text", "NHD"),
    "scale": ("?float", 0.25),
    "softcap": ("float", 0.0),
    "sinks": ("?tensor", f32(2)),
    "out": ("?output", f32(3, 2, 16)),
    "lse": ("?output", f32(3, 2)),
    "return_lse": ("flag", True),
}
BATCH = {
    "q_lens": ("ints", [3]),
    "kv_lens": ("ints", [10]),
    "block_tables": ("table", [[2, 0]]),
    "causal": ("flag", True),
    "window": ("?int", 5),
    "custom_mask": ("?tensor", np.ones(30, bool)),
    "allow_short_kv": ("flag", False),
    "batch_invariant": ("flag", False),
    "num_threads": ("?int", 1),
}
CP_BATCH = {
    "extend_lens": ("ints", [4, 4]),
    "seq_lens": ("?ints", [7, 4]),
    "cp_size": ("int", 2),
    "strategy": ("text", "zigzag"),
    "num_tokens": ("?int", 8),
    "kv_len_convention": ("text", "baked"),
    "compat": ("flag", False),
}
INDEXER = {
    "q": ("tensor", f32(2, 1, 16)),
    "k": ("tensor", f32(6, 16)),
    "weights": ("tensor", f32(2, 1)),
    "ks": ("ints", [0, 3]),
    "ke": ("ints", [6, 5]),
    "k_scale": ("?tensor", f32(6)),
}
TOPK = {
    "score": ("tensor", f32(2, 8)),
    "lengths": ("ints", [8, 4]),
    "topk": ("int", 3),
    "row_starts": ("?ints", [0, 1]),
    "sorted": ("flag", True),
}
SPLIT = {
    "x": ("tensor", f32(3, 16 + 8 + 4)),
    "q_weight": ("tensor", f32(16)),
    "kv_weight": ("tensor", f32(8)),
    "q_lora_rank": ("int", 16),
    "kv_lora_rank": ("int", 8),
    "qk_rope_head_dim": ("int", 4),
    "q_bias": ("?tensor", f32(16)),
    "kv_bias": ("?tensor", f32(8)),
}
SPARSE_MLA = {
    "q": ("tensor", f32(2, 4, 32)),
    "kv": ("tensor", f32(10, 1, 32)),
    "indices": ("tensor", i32([[7, 9, -1]], [[-1, 3, -1]])),
    "sm_scale": ("float", 0.125),
    "d_v": ("int", 16),
    "attn_sink": ("?tensor", f32(4)),
    "topk_length": ("?ints", [3, 2]),
}
MODE = {"forward_mode": ("int", ForwardMode.EXTEND)}
CODES = np.zeros((3, 1, 656), np.uint8)
INDEX_CACHE = np.zeros((4, 8 * 132), np.uint8)

NOT_SUPPORTED = (
    "pse_shift", "dequant_scale1", "quant_scale1", "dequant_scale2", "quant_scale2",
    "quant_offset2", "antiquant_scale", "antiquant_offset", "query_padding_size",
    "kv_padding_size", "key_antiquant_scale", "key_antiquant_offset", "value_antiquant_scale",
    "value_antiquant_offset", "key_shared_prefix", "value_shared_prefix",
    "actual_shared_prefix_len", "key_rope_antiquant_scale", "antiquant_mode",
    "key_antiquant_mode", "value_antiquant_mode",
)  # fmt: skip

CALLS = [
    Call(cpattn.paged_attention, {**LAYER, **BATCH, "page_size": ("?int", 8), **OPTIONS}),
    Call(
        cpattn.paged_attention,
        {
            **LAYER,
            "q_lens": ("ints", [3]),
            "kv_indptr": ("ints", [0, 2]),
            "kv_indices": ("ints", [2, 0]),
            "last_page_len": ("ints", [2]),
        },
    ),
    Call(
        cpattn.plan_attention,
        {
            **BATCH,
            "page_size": ("int", 8),
            "num_pages": ("int", 4),
            "num_heads": ("int", 2),
            "num_kv_heads": ("int", 1),
            "head_dim": ("int", 16),
            "v_head_dim": ("?int", 16),
        },
    ),
    Call(cpattn.run_attention, {"plan": ("value", PLAN), **LAYER, **OPTIONS}),
    Call(
        cpattn.merge_state,
        {
            "out_a": ("output", f32(2, 2, 16)),
            "lse_a": ("output", f32(2, 2)),
            "out_b": ("tensor", f32(2, 2, 16)),
            "lse_b": ("tensor", f32(2, 2)),
        },
    ),
    Call(
        cpattn.do_cp_attn_fia,
        {
            "q": ("tensor", f32(4, 32)),
            "k_cache": ("tensor", f32(4, 8, 1, 16)),
            "v_cache": ("tensor", f32(4, 8, 1, 16)),
            "metadata": ("value", METADATA),
            "block_tables": ("table", [[1], [2]]),
            "page_size": ("int", 8),
            "num_heads": ("int", 2),
            "num_kv_heads": ("int", 1),
            "scale": ("?float", 0.25),
            "out": ("?output", f32(4, 32)),
            "return_lse": ("flag", True),
        },
    ),
    Call(
        cpattn.npu.npu_fused_infer_attention_score,
        {
            "query": ("tensor", f32(3, 4, 16)),
            "key": ("tensor", f32(2, 8, 64)),
            "value": ("tensor", f32(2, 8, 64)),
            "input_layout": ("text", "TND"),
            "num_heads": ("int", 4),
            "num_key_value_heads": ("int", 4),
            "scale": ("float", 0.25),
            "block_table": ("?table", [[1, 0]]),
            "block_size": ("int", 8),
            "actual_seq_lengths": ("?ints", [3]),
            "actual_seq_lengths_kv": ("?ints", [10]),
            "query_rope": ("?tensor", f32(3, 4, 16)),
            "key_rope": ("?tensor", f32(2, 8, 64)),
            "sparse_mode": ("int", 3),
            "atten_mask": ("?tensor", np.ones((2048, 2048), bool)),
            "pre_tokens": ("int", 2147483647),
            "next_tokens": ("int", 2147483647),
            "inner_precise": ("int", 0),
            "softmax_lse_flag": ("flag", True),
            **dict.fromkeys(NOT_SUPPORTED, ("?nothing", None)),
        },
    ),
    Call(
        cpattn.npu.npu_lightning_indexer,
        {
            "query": ("tensor", f32(2, 1, 16)),
            "key": ("tensor", f32(2, 4, 1, 16)),
            "weights": ("tensor", f32(2, 1)),
            "actual_seq_lengths_query": ("?ints", [2]),
            "actual_seq_lengths_key": ("?ints", [5]),
            "block_table": ("?table", [[0, 1]]),
            "layout_query": ("text", "TND"),
            "layout_key": ("text", "PA_BSND"),
            "sparse_count": ("int", 3),
            "sparse_mode": ("int", 3),
            "pre_tokens": ("int", 2**63 - 1),
            "next_tokens": ("int", 2**63 - 1),
            "return_value": ("flag", True),
        },
    ),
    Call(
        cpattn.npu.npu_sparse_flash_attention,
        {
            "query": ("tensor", f32(2, 4, 16)),
            "key": ("tensor", f32(3, 8, 1, 16)),
            "value": ("tensor", f32(3, 8, 1, 16)),
            "sparse_indices": ("tensor", np.array([[[0, 9]], [[9, -1]]])),
            "scale_value": ("float", 0.25),
            "block_table": ("?table", [[2, 0]]),
            "actual_seq_lengths_query": ("?ints", [2]),
            "actual_seq_lengths_kv": ("?ints", [10]),
            "query_rope": ("?tensor", f32(2, 4, 16)),
            "key_rope": ("?tensor", f32(3, 8, 1, 16)),
            "sparse_block_size": ("int", 1),
            "layout_query": ("text", "TND"),
            "layout_kv": ("text", "PA_BSND"),
            "sparse_mode": ("int", 3),
            "pre_tokens": ("int", 2**63 - 1),
            "next_tokens": ("int", 2**63 - 1),
            "attention_mode": ("int", 2),
            "return_softmax_lse": ("flag", True),
        },
    ),
    Call(
        cpattn.sparse.flash_mla_sparse_fwd,
        {**SPARSE_MLA, "out": ("?output", f32(2, 4, 16)), "num_threads": ("?int", 1)},
    ),
    Call(cpattn.build_cp_metadata, {**CP_BATCH, "cp_rank": ("int", 0)}),
    Call(cpattn.build_cp_metadata_all_ranks, CP_BATCH),
    Call(
        cpattn.can_apply_cp,
        {
            "extend_lens": ("ints", [4, 4]),
            "cp_size": ("int", 2),
            "strategy": ("text", "zigzag"),
            "num_tokens": ("?int", 8),
            "forward_mode": ("?int", ForwardMode.EXTEND),
        },
    ),
    Call(
        cpattn.sparse.can_dsa_prefill_cp_interleave,
        {
            "extend_lens": ("ints", [4, 4]),
            "cp_size": ("int", 2),
            "strategy": ("text", "interleave"),
            "forward_mode": ("?int", ForwardMode.EXTEND),
        },
    ),
    Call(
        METADATA.shard,
        {"x": ("any", np.ones((8, 2))), "dim": ("int", 0), "truncate": ("flag", False)},
    ),
    Call(METADATA.unshard, {"parts": ("value", [f32(4, 2), f32(4, 2)]), "dim": ("int", 0)}),
    Call(
        cpattn.sparse.build_dsa_metadata,
        {
            "extend_lens": ("?ints", [3, 2]),
            "seq_lens": ("ints", [10, 4]),
            **MODE,
            "topk": ("int", 4),
            "fp8_kv_cache": ("flag", True),
            "prefill_impl": ("text", "flashmla_sparse"),
            "page_size": ("int", 1),
            "req_to_token": ("?table", np.arange(24).reshape(2, 12)),
            "req_pool_indices": ("?ints", [0, 1]),
            "cp_metadata": (
                "?value",
                cpattn.build_cp_metadata([3, 2], [10, 4], cp_rank=0, cp_size=1),
            ),
            "num_rows": ("?int", 5),
        },
    ),
    Call(
        cpattn.sparse.build_dsa_metadata,
        {
            "extend_lens": ("any", None),
            "seq_lens": ("ints", [10, 4]),
            "forward_mode": ("int", ForwardMode.TARGET_VERIFY),
            "topk": ("int", 4),
            "fp8_kv_cache": ("flag", True),
            "prefill_impl": ("text", "fa3"),
            "num_draft_tokens": ("int", 2),
        },
    ),
    Call(cpattn.sparse.indexer_logits, INDEXER),
    Call(cpattn.sparse.indexer_topk, {**INDEXER, "topk": ("int", 3), "sorted": ("flag", True)}),
    Call(
        cpattn.sparse.cp_indexer_topk,
        {
            "q": ("tensor", f32(4, 1, 16)),
            "index_k_cache": ("tensor", f32(2, 8, 16)),
            "weights": ("tensor", f32(4, 1)),
            "metadata": ("value", METADATA),
            "block_tables": ("table", [[0], [1]]),
            "page_size": ("int", 8),
            "topk": ("int", 3),
            "k_scale": ("?tensor", f32(2, 8)),
            "sorted": ("flag", True),
            "num_threads": ("?int", 1),
        },
    ),
    Call(
        cpattn.sparse.cp_indexer_topk,
        {
            "q": ("tensor", f32(4, 1, 16)),
            "index_k_cache": ("tensor", f32(2, 8, 16)),
            "weights": ("tensor", f32(4, 1)),
            "metadata": ("value", BARE_METADATA),
            "block_tables": ("table", [[0], [1]]),
            "page_size": ("int", 8),
            "topk": ("int", 3),
            "prefix_lens": ("ints", [3, 0]),
        },
    ),
    Call(
        cpattn.sparse.dcp_local_indices,
        {
            "indices": ("tensor", i32([9, 4, 7, 2, -1])),
            "dcp_rank": ("int", 1),
            "dcp_size": ("int", 2),
            "interleave_size": ("int", 1),
        },
    ),
    Call(cpattn.sparse.fast_topk, TOPK),
    Call(
        cpattn.sparse.fast_topk_transform_fused,
        {
            **TOPK,
            "page_table_size_1": ("table", i32(range(8), range(8))),
            "cu_seqlens_q": ("?ints", [0, 1, 2]),
            "page_size": ("int", 1),
        },
    ),
    Call(
        cpattn.sparse.fast_topk_transform_ragged_fused,
        {**TOPK, "topk_indices_offset": ("ints", [0, 9])},
    ),
    Call(
        cpattn.sparse.topk_transform,
        {
            "logits": ("tensor", f32(2, 8)),
            **{name: value for name, value in TOPK.items() if name != "score"},
            "method": ("?int", TopkTransformMethod.PAGED),
            "page_table": ("?table", i32(range(8), range(8))),
            "cu_seqlens_q": ("?ints", [0, 1, 2]),
            "topk_indices_offset": ("?ints", [0, 9]),
            "batch_idx_list": ("?ints", [1, 0]),
            "page_size": ("int", 1),
        },
    ),
    Call(
        cpattn.sparse.transform_index_page_table_decode,
        {
            "page_table": ("tensor", i32([3, 4], [5, 6])),
            "topk_indices": ("tensor", i32([1, 0], [0, -1])),
            "page_size": ("int", 1),
        },
    ),
    Call(
        cpattn.sparse.transform_index_page_table_prefill,
        {
            "page_table": ("tensor", i32([3, 4])),
            "topk_indices": ("tensor", i32([1, 0], [0, -1])),
            "extend_lens_cpu": ("ints", [2]),
            "page_size": ("int", 1),
        },
    ),
    Call(
        cpattn.sparse.page_table_to_topk,
        {
            "page_table": ("tensor", i32([3, 4], [5, 6])),
            "lengths": ("ints", [2, 1]),
            "topk": ("int", 2),
            "num_rows": ("?int", 3),
            "page_size": ("int", 1),
        },
    ),
    Call(
        cpattn.sparse.pad_topk_indices,
        {"topk_indices": ("any", i32([1, 0])), "num_tokens": ("int", 3)},
    ),
    Call(
        cpattn.get_topk_transform_method,
        {
            "forward_mode": ("?int", ForwardMode.EXTEND),
            "fp8_kv_cache": ("flag", True),
            "prefill_impl": ("text", "fa3"),
        },
    ),
    Call(
        cpattn.sparse.quantize_kv_rows,
        {
            "nope": ("tensor", f32(3, 512)),
            "rope": ("tensor", f32(3, 64)),
            "out": ("?output", CODES.copy()),
        },
    ),
    Call(
        cpattn.sparse.quantize_kv_rows_separate,
        {"nope": ("tensor", f32(3, 512)), "rope": ("tensor", f32(3, 64))},
    ),
    Call(
        cpattn.sparse.dequantize_kv_rows,
        {
            "rows": ("tensor", CODES),
            "indices": ("?ints", [2, 0]),
            "out": ("?output", np.zeros((2, 1, 576), ml_dtypes.bfloat16)),
        },
    ),
    Call(
        cpattn.sparse.hadamard_transform, {"x": ("tensor", f32(3, 16)), "scale": ("?float", 0.25)}
    ),
    Call(
        cpattn.sparse.quantize_index,
        {
            "x": ("tensor", f32(3, 128)),
            "dtype": ("text", "int8"),
            "scale_fmt": ("any", None),
        },
    ),
    Call(
        cpattn.sparse.quantize_index,
        {
            "x": ("tensor", f32(3, 128)),
            "dtype": ("text", "float8_e4m3fn"),
            "scale_fmt": ("?text", "ue8m0"),
        },
    ),
    Call(
        cpattn.sparse.write_index_k_cache,
        {
            "cache": ("output", INDEX_CACHE.copy()),
            "slots": ("ints", [3, 9]),
            "k": ("tensor", np.zeros((2, 128), np.uint8)),
            "k_scale": ("?tensor", f32(2)),
        },
    ),
    Call(
        cpattn.sparse.write_index_k_cache,
        {
            "cache": ("output", INDEX_CACHE.copy()),
            "slots": ("ints", [3, 9]),
            "k": ("tensor", f32(2, 128)),
            "scale_fmt": ("?text", "ue8m0"),
        },
    ),
    Call(
        cpattn.sparse.read_index_k_cache,
        {
            "cache": ("tensor", INDEX_CACHE),
            "slots": ("ints", [3, 9]),
            "dtype": ("text", "int8"),
        },
    ),
    Call(
        cpattn.sparse.split_qk_norm, {**SPLIT, "q_eps": ("float", 1e-6), "kv_eps": ("float", 1e-6)}
    ),
    Call(cpattn.sparse.fused_split_qk_norm, {**SPLIT, "eps": ("float", 1e-6)}),
    Call(
        cpattn.sparse.can_fuse_split_qk_norm,
        {"num_rows": ("int", 3), "neox_rope": ("flag", False), "uses_prefill_cp": ("flag", False)},
    ),
    Call(
        cpattn.sparse.dsa_use_prefill_cp,
        {
            "forward_mode": ("?int", ForwardMode.EXTEND),
            "has_cp_metadata": ("flag", True),
            "enabled": ("flag", True),
        },
    ),
    Call(cpattn.set_num_threads, {"num_threads": ("int", 2)}),
    Call(cpattn.profile, {"max_events": ("int", 10)}),
    Call(ForwardMode.EXTEND.is_extend, {"include_draft_extend_v2": ("flag", False)}, "ForwardMode"),
    Call(
        ForwardMode.EXTEND.is_context_parallel_extend,
        {"include_draft_extend_v2": ("flag", False)},
        "ForwardMode",
    ),
    Call(
        reference.paged_attention,
        {
            **LAYER,
            **{
                name: BATCH[name]
                for name in BATCH
                if name not in ("batch_invariant", "num_threads")
            },
            **{name: OPTIONS[name] for name in ("kv_layout", "scale", "softcap", "sinks")},
            "page_size": ("?int", 8),
        },
        "reference.paged_attention",
    ),
    Call(reference.flash_mla_sparse_fwd, SPARSE_MLA, "reference.flash_mla_sparse_fwd"),
    Call(
        reference.merge_state,
        {
            "out_a": ("tensor", f32(2, 2, 16)),
            "lse_a": ("tensor", f32(2, 2)),
            "out_b": ("tensor", f32(2, 2, 16)),
            "lse_b": ("tensor", f32(2, 2)),
        },
        "reference.merge_state",
    ),
    Call(reference.indexer_logits, INDEXER, "reference.indexer_logits"),
    Call(
        reference.rms_norm,
        {
            "x": ("tensor", f32(2, 16)),
            "weight": ("tensor", f32(16)),
            "eps": ("float", 1e-6),
            "bias": ("?tensor", f32(16)),
        },
        "reference.rms_norm",
    ),
    Call(
        reference.hadamard_transform,
        {"x": ("tensor", f32(2, 16)), "scale": ("?float", 0.25)},
        "reference.hadamard_transform",
    ),
    Call(
        reference.dequantize_kv_rows,
        {"rows": ("tensor", np.zeros((2, 656), np.uint8))},
        "reference.dequantize_kv_rows",
    ),
]
