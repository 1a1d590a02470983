# SPDX-License-Identifier: Apache-2.0
"""Every call of a supplied torch_npu operator in the installed sglang fits its schema."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from cpattn.integrations import torch_npu
from support.sglang.installed import MARKS

SGLANG = find_spec("sglang")
pytestmark = MARKS

with torch_npu.install():
    OPERATORS = torch.ops.npu
NAMES = [
    *("npu_fused_infer_attention_score", "npu_lightning_indexer", "npu_rotary_mul"),
    *("npu_scatter_nd_update_", "npu_sparse_flash_attention"),
]


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """What is called, the operator and its overload, and the arguments."""
    folders = SGLANG.submodule_search_locations if SGLANG else []
    for path in (path for folder in folders for path in Path(folder, "srt").rglob("*.py")):
        text = path.read_text("utf-8-sig")
        if "torch_npu" not in text and "torch.ops.npu" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call):
                source = ast.unparse(node.func)
                name = source.removeprefix("torch_npu.").removeprefix("torch.ops.npu.")
                operator, _, overload = name.partition(".")
                if name != source and operator in NAMES:
                    yield operator, overload or "default", node


CALLS = list(calls())


@pytest.mark.parametrize("name", NAMES)
def test_calls_fit_the_schema(name):
    mine = [(overload, call) for operator, overload, call in CALLS if operator == name]
    assert mine
    for overload, call in mine:
        arguments = getattr(getattr(OPERATORS, name), overload)._schema.arguments
        positional = [argument.name for argument in arguments if not argument.kwarg_only]
        given = set(positional[: len(call.args)]) | {keyword.arg for keyword in call.keywords}
        assert len(call.args) <= len(positional)
        assert given <= {argument.name for argument in arguments}
        assert given >= {a.name for a in arguments if not a.has_default_value()}
