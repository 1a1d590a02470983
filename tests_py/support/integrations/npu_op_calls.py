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


def calls() -> list[Call]:
    return [
        *(
            fia_call(layout, blocks, lse)
            for layout in LAYOUTS
            for blocks, lse in ((None, True), ("H", False), ("N", True))
            if blocks != "N" or layout[:3] in ("BNS", "TND", "NTD")
        ),
        *(indexer_call(form, value) for form in FORMS for value in (False, True)),
        *(sparse_call(case, lse) for case in SPARSE_CASES for lse in (False, True)),
    ]
