# SPDX-License-Identifier: Apache-2.0
"""Cases that lists of buffers get wrong or cannot decide, planned from layouts that say more."""

from __future__ import annotations

import re

import pytest

from cpattn import KVEntry, KVLayout, plan_kv_links, plan_kv_transfer
from test_kv_pointers import MHA_TABLE, MLA_TABLE, names

KINDS = {"K": "k", "V": "v", "I": "index_k"}
PAGE, NUM_PAGES = 64, 4  # bytes of a page; pages of a buffer


def layout(buffers: list[str], base: int, layers: tuple[int, int] | None) -> KVLayout:
    """A server with these buffers, one behind the other."""
    entries = []
    for i, name in enumerate(buffers):
        draft, kind, layer = re.fullmatch(r"(d?)(\w)(\d+)", name).groups()
        addr = base + i * PAGE * NUM_PAGES
        entries.append(KVEntry(int(layer), KINDS[kind], bool(draft), addr, PAGE * NUM_PAGES, PAGE))
    return KVLayout(entries, 16, layers=layers)


def planned(src: list[str], dst: list[str], layers: tuple[int, int]) -> list[tuple[str, str]]:
    """The names of the buffers that a plan pairs. A whole model need not say which layers."""
    sides = layout(src, 1 << 40, layers), layout(dst, 1 << 41, None)
    if "K0" not in dst:
        sides = sides[0], layout(dst, 1 << 41, layers)
    plan = plan_kv_transfer(*sides, [1], [2])
    stride = PAGE * NUM_PAGES
    return [
        (src[(s - (1 << 40)) // stride], dst[(d - (1 << 41)) // stride])
        for s, d in zip(plan.src_addrs.tolist(), plan.dst_addrs.tolist(), strict=True)
    ]


@pytest.mark.parametrize(("layers", "drafts", "first", "end", "dst_v"), MHA_TABLE)
def test_mha(layers: int, drafts: int, first: int, end: int, dst_v: list[str]) -> None:
    stage = names("KV", range(first, end))
    pairs = planned(stage, names("KV", range(layers), drafts), (first, end))
    assert pairs == [(name, name) for name in stage]


@pytest.mark.parametrize("case", set(MLA_TABLE) - {"H"})
def test_mla(case: str) -> None:
    _, _, first, src, dst, _ = MLA_TABLE[case]
    end = 1 + max(int(name[1:]) for name in src if name[0] != "d")
    assert planned(src, dst, (first, end)) == [(name, name) for name in src]


def test_a_stage_beyond_the_destination() -> None:
    """Case H: an error of the link if the destination is the whole model, else of all links."""
    _, _, first, src, dst, _ = MLA_TABLE["H"]
    source = layout(src, 1 << 40, (first, 4))
    with pytest.raises(ValueError, match=r"source has k of layer 3 .* which destination has not"):
        plan_kv_transfer(source, layout(dst, 1 << 41, None), [1], [2])
    stage = layout(dst, 1 << 41, (0, 3))
    assert len(plan_kv_transfer(source, stage, [1], [2])) == 2
    first_stage = layout(names("KV", [0, 1]), 1 << 42, (0, 2))
    with pytest.raises(ValueError, match="layer 3"):
        plan_kv_links([first_stage, source], [stage], [[1], [1]], [[2]])
