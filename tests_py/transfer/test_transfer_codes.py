# SPDX-License-Identifier: Apache-2.0
"""Scales go along with caches of 8 bits, and formats that do not fit are refused by name."""

import ctypes
from itertools import product

import pytest
import torch

import cpattn
from cpattn.transfer import KVEntry, KVLayout, plan_kv_links, plan_kv_transfer
from support.pairwise import pairwise
from support.transfer.plan_blocks import blocks

HEADS, DIM, PAGE = 4, 16, 8
FORMATS = [
    *product(("int8", "float8_e4m3fn", "float8_e5m2"), (None, "float32", "float16", "bfloat16")),
    ("bfloat16", None),
]


def make_pool(dtype, scale_dtype=None, heads=HEADS, page_size=PAGE, **options):
    return cpattn.kv.MHATokenToKVPool(
        size=8 * PAGE, page_size=page_size, num_layers=2, num_kv_heads=heads, head_dim=DIM,
        dtype=dtype, scale_dtype=scale_dtype, **options,
    )  # fmt: skip


def rows(pool, kind, layer):
    """Return the rows [slots, heads, ...] as bytes."""
    x = pool._layers[kind][layer].contiguous()
    return x.view(torch.uint8).reshape(pool.num_pages * pool.page_size, pool.num_kv_heads, -1)


@pytest.mark.parametrize(
    ("formats", "sizes", "use_fia"),
    pairwise(FORMATS, [(1, 1), (1, 2), (4, 1), (2, 4), (1, 8)], [(False, False), (True, False)]),
)
def test_codes_and_scales_arrive(formats, sizes, use_fia):
    """Tokens 3 to 20 go to other heads and pages; in scenario 57 over both layouts (#15852)."""
    (dtype, scale_dtype), (src_tp, dst_tp) = formats, sizes

    def side(tp_size, page_size, fia):
        pools = [
            make_pool(dtype, scale_dtype, max(1, HEADS // tp_size), page_size, use_fia=fia)
            for _ in range(tp_size)
        ]
        layouts = [
            KVLayout.from_pool(pool, tp_rank=rank, tp_size=tp_size, total_kv_heads=HEADS)
            for rank, pool in enumerate(pools)
        ]
        return pools, layouts

    def heads_of(rank, tp_size):
        first = rank * HEADS // tp_size
        return slice(first, first + max(1, HEADS // tp_size))

    sources, src_layouts = side(src_tp, PAGE, use_fia[0])
    destinations, dst_layouts = side(dst_tp, PAGE // 2, use_fia[1])
    generator = torch.Generator().manual_seed(7)
    k, v = torch.randn(2, 20, HEADS, DIM, generator=generator).bfloat16().unbind()
    src_pages, dst_pages = [5, 2, 7], [9, 3, 1, 12, 13]
    tokens = torch.arange(20)
    src_slots = torch.tensor(src_pages)[tokens // PAGE] * PAGE + tokens % PAGE
    half = PAGE // 2
    dst_slots = torch.tensor(dst_pages)[tokens // half] * half + tokens % half
    for rank, pool in enumerate(sources):
        heads = heads_of(rank, src_tp)
        pool.set_kv_buffer(1, src_slots, k[:, heads].contiguous(), v[:, heads].contiguous())
    links = plan_kv_links(
        src_layouts, dst_layouts, [src_pages] * src_tp, [dst_pages] * dst_tp,
        first_token=3, num_tokens=17,
    )  # fmt: skip
    for link in links:
        for source, destination, length in blocks(link.plan):
            ctypes.memmove(destination, source, length)
    whole = make_pool(dtype, scale_dtype)
    whole.set_kv_buffer(1, src_slots, k, v)
    for rank, pool in enumerate(destinations):
        for kind in pool.kinds:
            got = rows(pool, kind, 1)
            expected = torch.zeros_like(got)
            expected[dst_slots[3:]] = rows(whole, kind, 1)[src_slots[3:]][:, heads_of(rank, dst_tp)]
            assert torch.equal(got, expected), kind
            assert not rows(pool, kind, 0).any()


def layout_of(pool):
    return KVLayout.from_pool(pool)


def test_layouts_say_what_the_bytes_are():
    layout = layout_of(make_pool("int8", "float16"))
    kinds = [(entry.kind, entry.dtype, entry.item_len) for entry in layout.entries[::2]]
    codes, scales = PAGE * HEADS * DIM, PAGE * HEADS * 2
    assert kinds == [
        ("k", "int8", codes), ("v", "int8", codes),
        ("k_scale", "float16", scales), ("v_scale", "float16", scales),
    ]  # fmt: skip
    assert KVLayout.from_dict(layout.to_dict()) == layout
    other = layout_of(make_pool("int8", "float16"))
    assert layout != other  # it lies elsewhere


ONE = "of layer 0 must have one dtype on both sides, got"


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        (("int8",), ("float8_e5m2",), f"k {ONE} int8 at the source and float8_e5m2 at the dest"),
        (("bfloat16",), ("int8", "float16"), f"k {ONE} bfloat16 at the source and int8 at the des"),
        (
            ("int8", "float16"),
            ("int8",),
            r"source has k_scale of layer 0 .*, which destination has",
        ),
        (
            ("int8",),
            ("int8", "float32"),
            r"destination has k_scale of layer 0 .*, which source has",
        ),
        (("int8", "float16"), ("int8", "bfloat16"), f"k_scale {ONE} float16 at the source and bfl"),
    ],
)
def test_other_formats_are_refused_by_name(src, dst, message):
    layouts = [layout_of(make_pool(*formats)) for formats in (src, dst)]
    for pages in ([], [1, 2]):
        with pytest.raises(ValueError, match=f"^plan_kv_transfer: {message}"):
            plan_kv_transfer(*layouts, pages, pages)


def test_a_side_that_does_not_say_what_it_has_is_compared_by_lengths():
    known = layout_of(make_pool("int8"))
    entries = [entry._replace(dtype="", addr=entry.addr + (1 << 40)) for entry in known.entries]
    plan = plan_kv_transfer(known, KVLayout(entries, PAGE), [1], [2])
    assert plan.total_bytes == 4 * PAGE * HEADS * DIM
    wide = [e._replace(item_len=2 * e.item_len, nbytes=2 * e.nbytes) for e in entries]
    spaced = [e._replace(addr=e.addr + i * (1 << 30)) for i, e in enumerate(wide)]
    with pytest.raises(ValueError, match="must have the same bytes for each token and head"):
        plan_kv_transfer(known, KVLayout(spaced, PAGE), [1], [2])


def test_messages_of_peers_that_know_no_dtypes():
    """A peer of an earlier release sends entries of seven fields."""
    entry = KVEntry(0, "k", False, 4096, 1024, 512)
    assert KVLayout.from_dict({"entries": [list(entry)[:7]], "page_size": 8}).entries == (entry,)
    with pytest.raises(ValueError, match="KVLayout: dtype of k of layer 0 must be at most 40"):
        KVLayout([entry._replace(dtype="x" * 41)], 8)
    with pytest.raises(TypeError, match="KVLayout: dtype must be a str, got int"):
        KVLayout([entry._replace(dtype=8)], 8)


def test_plans_name_scales():
    pools = [make_pool("int8", "float32") for _ in range(4)]
    plan = plan_kv_transfer(layout_of(pools[0]), layout_of(pools[1]), [1], [2])
    assert "2 × k_scale, 2 × v_scale" in repr(plan)
    assert plan.total_bytes == 4 * PAGE * HEADS * (DIM + 4)
    layouts = KVLayout.from_pool(*pools[::2]), KVLayout.from_pool(*pools[1::2])
    assert "draft v_scale" in repr(plan_kv_transfer(*layouts, [1], [2]))
