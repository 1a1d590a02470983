# SPDX-License-Identifier: Apache-2.0
"""The code of docs/how_to/sharded_attention.md runs, and computes attention."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from support.cases import assert_attention
from support.places import ROOT

PAGE = ROOT / "docs" / "how_to" / "sharded_attention.md"


def test_the_code_of_the_page(capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {}
    try:
        for block in blocks[:2]:
            exec(block, names)
        pools = {"k_cache": names["k_shard"].clone(), "v_cache": names["v_shard"].clone()}
        q = names["cp"].gather(names["plan"], names["q"])
        batch = {"block_tables": names["tables"], "page_size": names["page_size"]}
        lens = {"q_lens": names["extend_lens"], "kv_lens": names["seq_lens"]}
        assert_attention(names["out"], None, {"q": q, **pools, **batch, **lens})
        assert capsys.readouterr().out.startswith("gather a rank receives at most 0 bytes")
        exec(blocks[2], names)
        assert torch.equal(names["cp"].gather(names["plan"], names["rows"]), names["out"])
        exec(blocks.pop(3), names)  # by which ranks know that they share memory
        assert capsys.readouterr().out == "shm\n"
        exec(blocks[3], names)
        assert names["prefixes"].next_layer == len(names["pools"])
        exec(blocks[4], names)
        exec(blocks[5], names)
        assert capsys.readouterr().out.startswith("gather a rank receives at most ")
        exec(blocks[6], names)
        slots = names["plan"].slots
        written = names["packed"][:, : 16 * 128].reshape(-1, 128).any(dim=1)
        assert written.nonzero().flatten().tolist() == sorted(slots)
        exec(blocks[7], names)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    pools = {"k_cache": names["k_shard"], "v_cache": names["v_shard"]}
    lens = {"q_lens": [1, 1], "kv_lens": [71, 334]}
    out, q = names["out"], names["q"]
    assert_attention(out, None, {"q": q, **pools, **batch, **lens}, op="ring of ranks")
    assert len(blocks) == 8
