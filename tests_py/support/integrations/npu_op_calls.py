# SPDX-License-Identifier: Apache-2.0
"""Calls of torch.ops.npu with tensors and lists, as torch_npu takes them."""

from __future__ import annotations

from typing import Any

import torch

from cpattn.integrations import torch_npu
from support.integrations.torch_op_calls import Call
from support.npu.fia_cases import LAYOUTS, TEMPLATE, FiaBatch
from support.npu.lightning_cases import FORMS, Operator
from support.npu.sparse_flash_cases import Batch, Case

with torch_npu.install():  # registers them
    OPERATORS = torch.ops.npu

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
    """As sglang decodes: absorbed MLA, lengths of keys in a tensor; and codes of int8."""
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
    numbers = torch.rand(2, 2, 2, 32, generator=draw)  # of scales and offsets, [N, D] of both
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


def calls() -> list[Call]:
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
