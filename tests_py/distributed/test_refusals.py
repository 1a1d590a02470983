# SPDX-License-Identifier: Apache-2.0
"""Calls of `ContextParallel` refuse wrong arguments before anything is sent or written."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from support.distributed.planning import one_rank
from support.distributed.sharded_worker import PLACEMENTS

pytestmark = pytest.mark.usefixtures("world")


def z(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, **options)


@torch.inference_mode()
def of_inference(*shape: int) -> torch.Tensor:
    return z(*shape)


def ropes(num_rows: int, heads: int, dim: int = 16, **options: Any) -> dict[str, Any]:
    return {"q_rope": z(num_rows, heads, dim), "k_rope": z(40, 2, 16), **options}


LENS: dict[str, Any] = {
    "extend_lens": [4, 6], "seq_lens": [9, 6], "block_tables": [[5, 3, 9], [2, 7, 0]]
}  # fmt: skip
STEP = {"kv_lens": [9, 6], "block_tables": LENS["block_tables"]}
SPARSE = {
    "q": (2, 32), "kv": (40, 1, 32), "index_q": (1, 16), "index_k": (10, 4, 16), "weights": (1,),
    "topk": 2, "sm_scale": 1.0, "d_v": 16,
}  # fmt: skip
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
SPARSE_SIZES = {"topk": 64, "num_heads": 16, "num_index_heads": 4}
TENSORS = [name for name, x in SPARSE.items() if isinstance(x, tuple)]


def sparse(num_rows: int) -> dict[str, Any]:
    """Return arguments of sparse attention with so many rows."""
    rows = ("q", "index_q", "weights")
    return {
        name: z(*([num_rows] if name in rows else []), *x) if isinstance(x, tuple) else x
        for name, x in SPARSE.items()
    }


NEW = {"k_local": torch.ones(10, 2, 32), "v_local": torch.ones(10, 2, 32)}
KV = {"k_cache": z(40, 2, 32), "v_cache": z(40, 2, 32)}
POOLS = z(40, 2, 32), z(40, 2, 32)
SHARDS = {"k_shard": z(40, 2, 32), "v_shard": z(40, 2, 32)}
# Usual arguments besides the plan, by call.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "plan_decode": STEP,
    "write_kv": NEW | KV,
    "attend": {"q_local": z(10, 4, 32), **KV},
    "decode": {"q": z(2, 4, 32), **SHARDS},
    "attend_sparse": sparse(10),
    "decode_sparse": sparse(2),
    "choose_exchange": SIZES,
    "choose_sparse_exchange": SPARSE_SIZES,
    "head_range": {},
    "prefetch": {},
    "gather": {},
}
NO_PLAN = ("plan_decode", "head_range")
WHOLE = {"placement": None}
HALF = torch.zeros(40, 2, 32, dtype=torch.float16)
CODES = dict.fromkeys(KV, torch.zeros(40, 2, 32, dtype=torch.int8))
SCALES = dict.fromkeys(("k_scale", "v_scale"), torch.ones(40, 2))
BITS = torch.ones(4 * 9 + 6 * 6, dtype=torch.bool)
ROWS = "the shard of rank 0 must have the 40 rows"
FEW = "must have at least the 10 rows of"

# A row is a call on sharded pools, the arguments that are changed, and the message.
SHARDED: list[tuple[str, dict[str, Any], str]] = [
    ("attend", {"q_local": z(9, 4, 32)}, f"q_local {FEW} rank 0, got 9"),
    ("attend", {"q_local": z(10, 128)}, r"q must be \[num_rows, num_heads, dim\], got shape"),
    ("attend", {"k_cache": z(32, 2, 32)}, ROWS),
    ("attend", {"k_cache": z(40, 64)}, r"k_shard must be contiguous, \[num_slots, num_kv_heads"),
    ("attend", {"v_cache": None}, "v_head_dim must be given without v_shard, from 1 to the 32 el"),
    ("attend", {"out": z(10, 4, 16)}, r"out must be \[10, 4, 32\] of torch.float32, got"),
    ("attend", {"out": z(10, 4, 1).expand(10, 4, 32)}, r"out must not be a .* \[4, 1, 0\]"),
    ("attend", {"k_rope": z(40, 2, 16)}, "q_rope and k_rope must be given together"),
    ("attend", ropes(10, 4, 32), r"q_rope must be \[10, 4, 16\] of torch.float32, as queries and"),
    ("attend", {"q_rope": z(10, 4, 16), "k_rope": z(32, 2, 16)}, ROWS),
    ("attend", {"window": -1}, "paged_attention: window"),
    ("attend", {"sinks": z(3)}, "paged_attention: sinks"),
    ("attend", {"bias": z(2, 1, 6, 8)}, r"bias must have at least 9 \(keys\) or 1 in dim"),
    ("attend", {"bias": [z(1, 4, 9)]}, "bias must be a tensor or a list of 2 tensors, one for"),
    ("decode", {"bias": z(2, 3, 1, 9)}, r"bias must have 4 \(num_heads\) or 1 in dimension 1"),
    ("attend", {"alibi_slopes": z(3)}, "paged_attention: alibi_slopes"),
    ("attend", {"alibi_slopes": z(9, 4)}, r"alibi_slopes must have shape \[2, 4\], got"),
    ("attend", {"relative_bias": z(4, 2)}, "paged_attention: relative_bias must be"),
    ("attend", {"q_local": z(10, 4, 32).bfloat16()}, "paged_attention: k_cache must be bfloat16"),
    *(
        ("attend", CODES | SCALES | {"cp": {"exchange": x}}, "need the exchange pass_q, got")
        for x in ("gather", "ring", "all_to_all")
    ),
    ("attend", CODES, "attend: k_scale must be given for a cache of int8"),
    ("attend", CODES | {"k_scale": 0.1}, "attend: v_scale must be given for a cache of int8"),
    ("write_kv", {"v_local": None}, "v_local and v_shard must .* got no v_local"),
    ("write_kv", {"v_cache": None}, "v_local and v_shard must .* got no v_shard"),
    ("decode", {"q": z(10, 4, 32)}, "q must have the 2 rows of the plan, got 10"),
    ("decode", {"k_shard": z(36, 2, 32), "v_shard": z(36, 2, 32)}, ROWS),
    ("decode", {"exchange": "ring"}, "exchange must be one of auto, gather, all_to_all, got 'ri"),
    ("decode", {"out_heads": "mine"}, "out_heads must be one of all, own, got 'mine'"),
    ("decode", {"num_heads": 8}, r"q must be \[num_tokens, 8, head_dim\] of rank 0, for 8 heads"),
    ("decode", {"num_heads": 0}, "num_heads must be >= 1, got 0"),
    ("decode", ropes(2, 3, num_heads=4), r"q_rope must be \[num_tokens, 4, head_dim\] of rank"),
    ("decode", ropes(3, 4, num_heads=4), "q_rope must have the 2 rows of the plan, got 3"),
    ("plan_decode", {"q_lens": [1]}, "must have an entry for each request, and one at"),
    ("plan_decode", {"kv_lens": []}, "an entry for each request, and one at least, got 0 and 0"),
    ("plan_decode", {"q_lens": [1, 7]}, r"got q_lens\[1\] = 7 for kv_lens\[1\] = 6"),
    ("plan_decode", {"kv_lens": [9, 60]}, r"block_tables must be \[bs, >= ceil"),
    ("plan_decode", {"kv_lens": [9, 9], "block_tables": [[1, 2, 3], [4, 5, 3]]}, "got row 12 for"),
    ("plan_decode", {"cp": WHOLE}, "needs a placement"),
    ("attend_sparse", {"q": z(9, 2, 32)}, f"q {FEW} the plan, got"),
    ("attend_sparse", {"weights": z(9, 1)}, f"weights {FEW} the plan"),
    ("attend_sparse", {"index_q": z(11, 1, 16)}, "q, index_q and weights must have as many rows"),
    ("attend_sparse", {"kv": z(36, 1, 32)}, ROWS),
    ("attend_sparse", {"index_k": z(9, 4, 16)}, ROWS),
    ("attend_sparse", {"index_k": z(36, 1, 16)}, ROWS),
    ("attend_sparse", {"kv": z(40, 2, 32)[:, :1]}, "kv must be contiguous, got strides"),
    ("attend_sparse", {"out": z(10, 2, 32)}, r"out must be \[10, 2, 16\] of torch.float32, got"),
    ("attend_sparse", {"topk": 0}, "cp_sparse_mla: topk must be 1 to"),
    ("attend_sparse", {"d_v": 0}, r"cp_sparse_mla: d_v must be in \[1, 576\]"),
    ("attend_sparse", {"index_k": z(40, 16)}, "cp_sparse_mla: index_k_cache must be"),
    ("attend_sparse", {"weights": z(10, 3)}, "cp_sparse_mla: weights must"),
    ("attend_sparse", {"attn_sink": z(3)}, "cp_sparse_mla: attn_sink must have shape"),
    ("attend_sparse", {"plan": {"custom_mask": BITS}}, "plan must have no mask"),
    ("attend_sparse", {"cp": {"exchange": "ring"}}, "exchange must be auto or pass_q"),
    ("decode_sparse", sparse(10), "q must have the 2 rows of the plan, got 10"),
    ("decode_sparse", {"q": z(1, 2, 32)}, "q must have at least the 2 rows of the plan, got"),
    ("decode_sparse", {"kv": z(36, 1, 32)}, ROWS),
    ("choose_exchange", {"num_heads": 3}, "num_heads must be a multiple of num_kv_heads, got 3"),
    ("choose_exchange", {"head_dim": 0}, "head_dim must be >= 1, got 0"),
    ("choose_exchange", {"cp": WHOLE}, "plan must be of sharded pools"),
    ("choose_sparse_exchange", {"topk": 0}, "topk must be >= 1, got 0"),
    ("choose_sparse_exchange", {"cp": WHOLE}, "plan must be of new tokens over sharded pools"),
    ("choose_sparse_exchange", {"step": True}, "plan must be of new tokens over sharded pools"),
    ("head_range", {"num_heads": 0}, "num_heads must be >= 1"),
    *(
        ("prefetch", {"layers": layers}, message)
        for layers, message in (
            ([], "layers must be one at least, got none"),
            ([(z(40, 2, 64)[:, :, ::2],)], r"layers\[0\].k_cache must be contiguous"),
            ([POOLS, (POOLS[0], z(40, 1, 32))], r"layers\[1\].v_cache must ha"),
            ([(POOLS[0], None, z(40, 1, 32))], "k_rope must have the 2 KV heads"),
            ([(z(36, 2, 32),)], ROWS),
            ([(*POOLS, None, -1)], r"layers\[0\].window must be >= 0 .*, got -1"),
        )
    ),
    ("prefetch", {"layers": [POOLS], "cp": WHOLE}, "plan must be of sharded pools"),
    ("prefetch", {"layers": [POOLS], "cp": {"exchange": "ring"}}, "gather or auto, got ring"),
    ("prefetch", {"layers": [POOLS], "cp": {"max_scratch_bytes": 2047}}, "at least .* got 2047"),
]
# Refusals on whole pools.
REPLICATED: list[tuple[str, dict[str, Any], str]] = [
    ("attend", {"q_rope": z(10, 32), "k_rope": z(40, 2, 32)}, r"q_rope must be \[num_rows, num_he"),
    ("attend", {"v_cache": None}, "v_head_dim must be given without v_cache"),
    ("attend", {"q_local": z(10, 4)}, r"q_local must be .* got shape \[10, 4\]"),
    ("attend", {"out": z(10, 8, 32)[:, ::2]}, r"out must be .* contiguous rows, got shape \[10, 4"),
    ("attend", {"out": z(10, 32)}, r"out must be .*, got shape \[10, 32\]"),
    ("attend_sparse", {"plan": {"custom_mask": BITS}}, "plan must have no mask"),
    ("write_kv", {"k_local": z(9, 2, 32)}, f"k_local {FEW} rank 0"),
    ("write_kv", {"v_local": z(10, 2)}, r"v_cache must be .* got \[40, 2, 32\] for \[10, 2\]"),
    ("write_kv", {"v_cache": z(40, 2, 33)}, r"v_cache must be .* got \[40, 2, 33\]"),
    ("write_kv", {"k_cache": z(5, 8, 2, 32)}, r"k_cache must be .*\[num_pages, 4,"),
    ("write_kv", {"k_cache": HALF}, "contiguous torch.float32, got torch.float16"),
    ("write_kv", {"k_cache": z(40, 2, 64)[..., ::2]}, r"of strides \[128, 64, 2\]"),
    ("write_kv", {"v_cache": z(36, 2, 32)}, r"below the 36 rows of v_cache, got 36"),
    ("write_kv", {"v_local": None}, "v_local and v_cache must .* got no v_local"),
    ("write_kv", {"v_cache": None}, "v_local and v_cache must .* got no v_cache"),
    *(
        ("attend", NEW | {"k_cache": z(a, 2, 32), "v_cache": z(b, 2, 32)}, "same whole pages of")
        for a, b in ((41, 41), (40, 44), (40, 80))
    ),
]
# Refusals on whole and sharded pools, of attention that also writes.
WRITING: list[tuple[dict[str, Any], str]] = [
    ({"k_local": None}, "v_local must come with k_local, got none"),
    ({"v_local": None}, "v_local and v_(cache|shard) must be given together, got no v_local"),
    ({"k_local": z(9, 2, 32)}, f"k_local {FEW} rank 0"),
    ({"v_local": z(10, 3, 32)}, r"v_(cache|shard) must be \[num_slots, num_kv_heads"),
    ({"k_local": HALF[:10]}, "k_(cache|shard) must be contiguous .*float16"),
    ({"q_local": z(9, 4, 32)}, f"q_local {FEW} rank 0"),
    ({"out": z(10, 4, 8)}, r"out must be \[10, 4, 32\]"),
    (ropes(10, 4), "k_local must be without k_rope"),
    ({"window": -1}, "window"),
    ({"k_cache": z(36, 2, 32), "v_cache": z(36, 2, 32)}, "block.tables|the 40 rows|36 rows"),
]
TYPES: list[tuple[str, dict[str, Any], str]] = [
    ("decode", {"return_lse": 1}, "return_lse must be a bool"),
    ("decode", {"step": False}, r"plan must be one of ContextParallel\.plan_decode"),
    ("attend", {"step": True}, r"plan must be one of ContextParallel\.plan, got D"),
    ("write_kv", {"k_local": None, "v_local": None, "v_cache": None}, "k_.* must be a tensor, got"),
    ("attend_sparse", {"kv": [1.0]}, r"kv must be a torch\.Tensor, got list"),
    *(
        ("attend_sparse", {name: np.ones(2)}, rf"{name} must be a torch\.Tensor, got ndarray")
        for name in ("attn_sink", "index_k_scale")
    ),
    ("attend_sparse", {"return_lse": 1}, "return_lse must be a bool"),
    ("choose_sparse_exchange", {"num_heads": 1.0}, "num_heads must be an integer"),
    ("head_range", {"num_heads": "4"}, "num_heads must be an integer"),
    *(
        ("prefetch", {"layers": layers}, message)
        for layers, message in (
            (7, "layers must be a sequence, got int"),
            ([POOLS[0]], r"layers\[0\] must be LayerCaches, or a tuple like it, got Tens"),
            ([()], r"layers\[0\] must be LayerCaches"),
            ([(None, POOLS[0])], "k_cache must be a tensor on the CPU, got NoneType"),
            ([(z(40, 2, 32, device="meta"),)], "k_cache must be on the CPU, got meta"),
            ([(z(40, 2, 32, requires_grad=True),)], r"layers\[0\].k_cache requires a gradient"),
            ([(*POOLS, None, 1.5)], "window must be an int"),
        )
    ),
    *(
        (call, {name: z(*shape, **kind), **more}, f"{told} {message}")
        for kind, message in (
            ({"device": "meta"}, "must be on the CPU, got meta"),
            ({"requires_grad": True}, "requires a gradient, which cpattn does not compute"),
        )
        for call, name, told, shape, more in (
            ("gather", "x_local", "x_local", (10, 4), {}),
            ("write_kv", "k_local", "k_local", (10, 2, 32), {}),
            ("write_kv", "k_cache", "k_shard", (40, 2, 32), {}),
            ("write_kv", "v_cache", "v_cache", (40, 2, 32), {"cp": WHOLE}),
            ("attend", "out", "out", (10, 4, 32), {}),
            ("decode", "q", "q", (2, 4, 32), {"num_heads": 4}),
        )
    ),
    *(
        (call, {name: of_inference(*shape), **more}, f"{told} must not be an inference tensor")
        for call, name, told, shape, more in (
            ("attend", "out", "out", (10, 4, 32), {}),
            ("attend", "out", "out", (10, 4, 32), {"cp": WHOLE, **NEW}),
            ("attend_sparse", "out", "out", (10, 2, 16), {}),
            ("write_kv", "k_cache", "k_shard", (40, 2, 32), {}),
            ("write_kv", "v_cache", "v_cache", (40, 2, 32), {"cp": WHOLE}),
        )
    ),
]
# Functions that refuse their own arguments by their own names.
CORE = ("paged_attention: ", "cp_sparse_mla: ", "do_cp_attn_fia: ")
PADDED = {"causal": False, "plan": {"num_tokens": 12}, "q_local": z(12, 4, 32)}
ALL = [
    *((*row, ValueError) for row in SHARDED),
    *((call, {"cp": WHOLE} | x, message, ValueError) for call, x, message in REPLICATED),
    *(
        ("attend", NEW | {"cp": cp} | x, message, ValueError)
        for (x, message), cp in itertools.product(WRITING, ({}, WHOLE))
    ),
    *(
        ("attend", PADDED | {"cp": cp}, "causal=False needs a mask, or a plan without", ValueError)
        for cp in ({}, WHOLE)
    ),
    *((*row, TypeError) for row in TYPES),
]


@pytest.mark.parametrize(
    ("call", "changes", "message", "error"), ALL, ids=[f"{row[0]}: {row[2]}" for row in ALL]
)
def test_refused(call, changes, message, error):
    arguments = {
        name: x.clone()
        if isinstance(x, torch.Tensor) and x.is_contiguous() and not x.is_inference()
        else x
        for name, x in (ARGUMENTS[call] | changes).items()
    }
    cp = one_rank(**arguments.pop("cp", {}))
    lens = LENS | arguments.pop("plan", {})
    step = arguments.pop("step", call.startswith("decode"))
    if call not in NO_PLAN:
        arguments["plan"] = cp.plan_decode(**STEP) if step else cp.plan(**lens)
    rows = [arguments.pop(name) for name in TENSORS] if call.endswith("_sparse") else []
    plan = [arguments.pop("plan")] if "plan" in arguments else []
    with pytest.raises(error, match=message) as raised:
        getattr(cp, call)(*plan, *rows, **arguments)
    said = str(raised.value)
    assert said.startswith((f"ContextParallel.{call}: ", *CORE))
    for name in ("k_cache", "v_cache"):
        x = arguments.get(name)
        assert not isinstance(x, torch.Tensor) or x.is_meta or not x.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exchange": "pass_kv"}, "exchange must be one of auto, gather, ring, pass_q"),
        ({"placement": 4}, "placement must have shard_size, owner_of, local_index, got"),
        ({"placement": PLACEMENTS["pages"](2, 4)}, "over the 1 ranks of .* shard_size 2"),
        ({"page_size": 8}, "placement must have the page_size 8, got 4"),
        ({"page_size": 0}, "page_size must be positive, got 0"),
        ({"max_scratch_bytes": 0}, "max_scratch_bytes must be >= 1, got 0"),
        ({"transport": "rdma"}, "transport must be auto, tcp, shm, got 'rdma'"),
        ({"exchange": "usp"}, "exchange 'usp' needs a DeviceMesh with the dimensions"),
    ],
)
def test_constructor_refuses(options, message):
    error = TypeError if options == {"placement": 4} else ValueError
    with pytest.raises(error, match=f"^ContextParallel: .*{message}"):
        one_rank(**options)


def test_what_is_asked_for_is_given():
    cp = one_rank()
    assert cp.head_range(7) == slice(0, 7)
    assert cp.choose_sparse_exchange(cp.plan(**LENS), **SPARSE_SIZES) == cp.choose_sparse_exchange(
        cp.plan(**LENS), **SPARSE_SIZES, latent_bytes=576 * 2, index_key_bytes=128 * 2
    )
