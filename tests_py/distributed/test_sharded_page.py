# SPDX-License-Identifier: Apache-2.0
"""The code of docs/how_to/sharded_attention.md runs, and computes attention."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

import cpattn
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
        assert_same_bits_in_shared_scratch(names)
        exec(blocks[3], names)
        assert_last_layer_ahead(names)
        exec(blocks[4], names)
        assert_sparse_layer(names)
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


def assert_same_bits_in_shared_scratch(names):
    """What "gather" gives from then on is what it has given."""
    cp, plan = names["cp"], names["plan"]
    assert cp._exchange.scratch == []
    caches = names["k_shard"], names["v_shard"]
    new = {"k_local": names["k"], "v_local": names["v"]}
    assert torch.equal(cp.attend(plan, names["q"], *caches, **new), names["out_local"])
    assert len(cp._exchange.scratch) == 2


def assert_last_layer_ahead(names):
    """The last layer of the page has the bits that it has without `prefetch`."""
    cp, plan, layers = names["cp"], names["plan"], names["pools"]
    assert names["prefixes"].next_layer == len(layers)
    assert torch.equal(names["out"], cp.attend(plan, names["q"], *layers[-1]))


def assert_sparse_layer(names):
    """The layer of the page is that of one pool, which the shard of a single rank is."""
    rows = [names["cp"].gather(names["plan"], names[name]) for name in ("q", "index_q", "weights")]
    metadata = cpattn.build_cp_metadata(
        names["extend_lens"], names["seq_lens"], cp_rank=0, cp_size=1, strategy="contiguous"
    )
    expected = cpattn.sparse.cp_sparse_mla(
        rows[0], names["kv_shard"], rows[1], names["index_shard"], rows[2], metadata,
        block_tables=names["plan"].block_tables, page_size=names["page_size"], topk=64,
        sm_scale=192**-0.5,
    )  # fmt: skip
    assert torch.equal(names["cp"].gather(names["plan"], names["out"]), expected)
