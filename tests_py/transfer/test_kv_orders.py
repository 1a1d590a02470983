# SPDX-License-Identifier: Apache-2.0
"""Entries with a stride between pages, or heads before tokens, are described, sent or refused."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from cpattn.transfer import KVEntry, KVLayout, LocalEngine, plan_kv_transfer, register
from support.transfer.plan_blocks import blocks

PAGES, PAGE, HEADS, DIM = 5, 4, 2, 8
SHAPES = {"NHD": (PAGE, HEADS, DIM), "HND": (HEADS, PAGE, DIM)}
ENTRY = KVEntry(0, "k", False, 1 << 40, 4 * 512 + 64, 64, page_stride=512)


def cache_of(kv_layout, seed=0):
    """Return float16 [pages, K and V, ...], whose numbers are shuffled."""
    rng = np.random.default_rng(seed)
    return rng.permuted(np.arange(PAGES * 2 * PAGE * HEADS * DIM)).astype(np.float16).reshape(
        PAGES, 2, *SHAPES[kv_layout]
    )  # fmt: skip


def layout_of(views, kv_layout="NHD", **placement):
    entries = [
        KVEntry.from_tensor(0, kind, view, kv_layout=kv_layout)
        for kind, view in zip("kv", views, strict=True)
    ]
    return KVLayout(entries, PAGE, total_kv_heads=HEADS, **placement)


def in_tokens(cache, kv_layout):
    """Return a view [pages, K and V, tokens, heads, dim]."""
    return cache if kv_layout == "NHD" else cache.swapaxes(2, 3)


@pytest.mark.parametrize("src_layout", SHAPES)
@pytest.mark.parametrize("dst_layout", SHAPES)
@pytest.mark.parametrize("num_tokens", [8, 7])
def test_views_of_a_cache_are_sent_into_views_of_another(src_layout, dst_layout, num_tokens):
    source, target = cache_of(src_layout, 1), cache_of(dst_layout, 2)
    expected = target.copy()
    src, dst = in_tokens(source, src_layout), in_tokens(expected, dst_layout)
    dst[3], dst[0, :, : num_tokens - PAGE] = src[1], src[4, :, : num_tokens - PAGE]
    sides = [layout_of(cache.swapaxes(0, 1), order)
             for cache, order in ((source, src_layout), (target, dst_layout))]  # fmt: skip
    plan = plan_kv_transfer(*sides, [1, 4], [3, 0], num_tokens=num_tokens)
    with (
        LocalEngine() as engine, LocalEngine() as peer,
        register(engine, sides[0]) as held, register(peer, sides[1], target),
    ):  # fmt: skip
        assert (held.addrs, held.sizes) == ((source.ctypes.data,), (source.nbytes,))
        plan.execute(engine, peer.session_id)
    if src_layout == dst_layout:  # whole pages are sent
        dst[0] = src[4]
    np.testing.assert_array_equal(target, expected)


def test_a_head_of_a_page_is_one_block():
    """Rank 1 of 2 gets its head from pages with both heads; rows would go token by token."""
    src = KVLayout([KVEntry(0, "k", False, 4096, 512, 128, kv_layout="HND")], 4, total_kv_heads=2)
    dst = KVLayout([KVEntry(0, "k", False, 8192, 4 * 96 + 64, 64, page_stride=96, kv_layout="HND")],
                   4, tp_rank=1, tp_size=2, total_kv_heads=2)  # fmt: skip
    plan = plan_kv_transfer(src, dst, [1, 3], [4, 0], num_tokens=6)
    assert blocks(plan) == [
        (4096 + 3 * 128 + 64, 8192, 2 * 16),
        (4096 + 128 + 64, 8192 + 4 * 96, 64),
    ]


def test_the_order_of_one_head_or_one_token_makes_no_difference():
    for heads, page_size in ((1, 4), (4, 1)):
        sides = [
            KVLayout([KVEntry(0, "k", False, 1 << at, 640, 64, kv_layout=order)], page_size,
                     total_kv_heads=heads)
            for at, order in ((20, "NHD"), (30, "HND"), (30, "NHD"))
        ]  # fmt: skip
        plans = [plan_kv_transfer(sides[0], side, [1, 2, 5], [4, 5, 0]) for side in sides[1:]]
        assert plans[0] == plans[1]
        assert len(plans[0]) == 2


def test_layouts_travel_with_stride_and_order():
    layout = layout_of(cache_of("HND").swapaxes(0, 1), "HND")
    assert [entry.page_stride for entry in layout.entries] == [256, 256]
    assert [entry.kv_layout for entry in layout.entries] == ["HND", "HND"]
    assert KVLayout.from_dict(json.loads(json.dumps(layout.to_dict()))).entries == layout.entries
    fields = layout.to_dict()
    fields["entries"] = [entry[:8] for entry in fields["entries"]]  # an older peer sends neither
    fields["entries"][0][4] = fields["entries"][1][4] = 128
    assert KVLayout.from_dict(fields).entries[0][8:] == (None, "NHD", "")
    for change in ({"page_stride": 512}, {"kv_layout": "NHD"}):
        entries = [entry._replace(**change) for entry in layout.entries]
        assert KVLayout([entries[0]], PAGE, total_kv_heads=HEADS) != KVLayout(
            [layout.entries[0]], PAGE, total_kv_heads=HEADS
        )


def test_from_tensor_takes_the_order_of_the_memory():
    """Engines show tensors in one order, but their memory has the other."""
    torch = pytest.importorskip("torch")
    cache = torch.zeros(PAGES, 2, HEADS, PAGE, DIM, dtype=torch.bfloat16)
    entry = KVEntry.from_tensor(7, "v", cache[:, 1].permute(0, 2, 1, 3), is_draft=True)
    assert entry == KVEntry(
        7, "v", True, cache.data_ptr() + 128, 4 * 256 + 128, 128, dtype="bfloat16",
        page_stride=256, kv_layout="HND",
    )  # fmt: skip
    assert KVEntry.from_tensor(7, "v", cache[:, 1], kv_layout="HND", is_draft=True) == entry
    dense = KVEntry.from_tensor(0, "k", cache[1])  # its K and V count as two pages
    assert (dense.item_len, dense.page_stride, dense.nbytes) == (128, None, 256)
    latents = torch.zeros(PAGES, PAGE, DIM, dtype=torch.uint8)
    assert KVEntry.from_tensor(0, "k", latents)[3:] == (
        latents.data_ptr(), 160, 32, True, "uint8", None, "NHD", "",
    )  # fmt: skip
    scales = torch.zeros(PAGES, HEADS, PAGE)
    for shown, order in ((scales, "HND"), (scales.swapaxes(1, 2), "NHD")):
        assert KVEntry.from_tensor(0, "k_scale", shown, kv_layout=order).kv_layout == "HND"
    empty = KVEntry.from_tensor(0, "k", latents[:0])
    assert (empty.nbytes, empty.item_len, empty.page_stride) == (0, 32, None)
    assert KVEntry.from_tensor(0, "k", latents[3:4]).nbytes == 32
    one = np.lib.stride_tricks.as_strided(CACHE, (1, *CACHE.shape[1:]), (1, *CACHE.strides[1:]))
    assert KVEntry.from_tensor(0, "k", one).nbytes == CACHE[:1].nbytes


CACHE = np.zeros((PAGES, PAGE, HEADS, DIM), np.uint8)


@pytest.mark.parametrize(
    ("tensor", "options", "message"),
    [
        (CACHE[..., ::2], {}, r"each page of tensor must be contiguous, got shape \[5, 4, 2, 4\]"),
        (CACHE[:, :, :1], {}, "each page of tensor must be contiguous"),
        (CACHE.swapaxes(0, 1), {}, "pages of tensor must have bytes and lie apart, got shape"),
        (CACHE[::-1], {}, "pages of tensor must have bytes and lie apart"),
        (CACHE[:, :0], {}, "pages of tensor must have bytes and lie apart"),
        (CACHE[0, 0], {}, r"tensor must have the shape \[num_pages, page_size, num_kv_heads, head"),
        (CACHE, {"kv_layout": "DHN"}, "kv_layout must be 'NHD' or 'HND', got 'DHN'"),
        (CACHE[:, :, 0].swapaxes(1, 2), {}, "each page of tensor must be contiguous"),
    ],
)
def test_tensors_that_are_no_pages_are_refused(tensor, options, message):
    with pytest.raises(ValueError, match=f"^KVEntry.from_tensor: {message}"):
        KVEntry.from_tensor(0, "k", tensor, **options)


def test_what_is_no_tensor_is_refused():
    for tensor in ([[1]], None, np.ma.masked_array(CACHE)):
        with pytest.raises(TypeError, match=r"^KVEntry.from_tensor: tensor must be a strided one"):
            KVEntry.from_tensor(0, "k", tensor)
    with pytest.raises(TypeError, match=r"^KVEntry.from_tensor: layer_id must"):
        KVEntry.from_tensor("0", "k", CACHE)


HND = ENTRY._replace(kv_layout="HND")
REFUSED = [
    (ENTRY._replace(page_stride=63), {}, "page_stride of k of layer 0 must be in [item_len 64, 2^"),
    (ENTRY._replace(page_stride=0), {}, "page_stride of k of layer 0 must be in [item_len 64, 2^6"),
    (ENTRY._replace(nbytes=5 * 512), {}, "nbytes of k of layer 0 must be a multiple of page_stride "
     "512 and, of the last page, item_len 64 below 2^63, got 2560"),
    (ENTRY._replace(nbytes=63), {}, "nbytes of k of layer 0 must be a multiple of page_stride 512"),
    (HND._replace(kv_layout="DHN"), {}, "kv_layout must be 'NHD' or 'HND', got 'DHN'"),
    (HND._replace(token_rows=False), {"total_kv_heads": 2},
     "kv_layout of k of layer 0 must be 'NHD' without token_rows, got 'HND'"),
    (HND, {}, "total_kv_heads must be given with kv_layout 'HND', as of k of layer 0"),
    (HND, {"total_kv_heads": 3}, "item_len of k of layer 0 must be a multiple of page_size 4 * 3 "
     "head(s), got 64"),
]  # fmt: skip


@pytest.mark.parametrize(("entry", "placement", "message"), REFUSED)
def test_entries_that_contradict_themselves_are_refused(entry, placement, message):
    with pytest.raises(ValueError, match=f"^KVLayout: {re.escape(message)}"):
        KVLayout([entry], PAGE, **placement)
    assert KVLayout([HND._replace(kind="index_k")], PAGE).entries[0].kv_layout == "HND"
    for wrong in ({"page_stride": 64.0}, {"kv_layout": None}):
        with pytest.raises(TypeError, match=rf"^KVLayout: {next(iter(wrong))} must"):
            KVLayout([entry._replace(**wrong)], PAGE)


def test_pairs_that_do_not_fit_are_refused():
    src = KVLayout([HND], PAGE, total_kv_heads=2)
    for dst, message in [
        (KVLayout([ENTRY], PAGE), "total_kv_heads must be the same on both sides, got 2 at"),
        (KVLayout([HND._replace(item_len=32, nbytes=4 * 512 + 32)], PAGE, total_kv_heads=2),
         "k of layer 0 must have the same bytes for each token and head on both sides"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=f"^plan_kv_transfer: {re.escape(message)}"):
            plan_kv_transfer(src, dst, [1], [1])


@pytest.mark.parametrize(
    ("addr", "changes", "good"),
    [
        (64, {}, True), (448, {}, True), (512 + 64, {}, True), (2 * 512 + 448, {}, True),
        (63, {}, False), (449, {}, False), (0, {}, False), (3 * 512, {}, False),
        (64, {"page_stride": 1024, "nbytes": 1024 + 64}, True),
        (512, {"page_stride": 1024, "nbytes": 1024 + 64}, False),
        (96, {"page_stride": 768, "nbytes": 768 + 64}, True),  # 256 divides both strides
        (256, {"page_stride": 768, "nbytes": 768 + 64}, False),  # they miss only by chance
        (700, {"page_stride": None, "nbytes": 64}, True), (1000, {"nbytes": 64}, False),
        (4 * 512 + 64, {}, True),
    ],
)  # fmt: skip
def test_buffers_of_a_destination_may_be_between_each_others_pages(addr, changes, good):
    other = ENTRY._replace(kind="v", addr=ENTRY.addr + addr, **changes)
    src = KVLayout([ENTRY._replace(addr=1 << 20), ENTRY._replace(addr=1 << 30, kind="v")], PAGE)
    dst = KVLayout([other, ENTRY], PAGE)
    if good:
        assert len(plan_kv_transfer(src, dst, [1], [0])) == 2
        return
    message = "destination buffers must not overlap, got [kv] of layer 0 at .*, pages of 64 every "
    with pytest.raises(ValueError, match=f"^plan_kv_transfer: {message}"):
        plan_kv_transfer(src, dst, [1], [0])


def test_more_pieces_than_a_plan_may_have_are_refused():
    wide = KVEntry(0, "k", False, 1 << 40, 1 << 36, 1 << 34)
    src, dst = (KVLayout([wide._replace(kv_layout=order)], 1 << 23, total_kv_heads=4)
                for order in ("NHD", "HND"))  # fmt: skip
    with pytest.raises(ValueError, match="pages and heads must cut a buffer into at most 16777216"):
        plan_kv_transfer(src, dst, [1], [1])


def pool_of(v_bytes, **told):
    """Return a pool of one layer that may tell more than it must."""
    return SimpleNamespace(
        kinds=("k", "v"), start_layer=3, num_layers=1, num_kv_heads=HEADS, page_size=PAGE,
        get_contiguous_buf_infos=lambda: ([4096, 1 << 20], [640, v_bytes], [128, 128]), **told,
    )  # fmt: skip


def test_a_pool_may_say_stride_and_order():
    told = KVLayout.from_pool(pool_of(4 * 256 + 128, page_strides={"v": 256}, kv_layout="HND"))
    assert [entry[8:] for entry in told.entries] == [(None, "HND", ""), (256, "HND", "")]
    for name, value in (("page_strides", [256]), ("kv_layout", 1), ("layout_tags", ["tiles"])):
        with pytest.raises(TypeError, match=rf"^KVLayout.from_pool: {name} of a pool must be a"):
            KVLayout.from_pool(pool_of(640, **{name: value}))
    tagged = pool_of(640, kv_layout="HND", layout_tags={"v": "tiles"})
    keys, values = KVLayout.from_pool(tagged).entries
    assert (keys.token_rows, keys.kv_layout, keys.layout_tag) == (True, "HND", "")
    assert (values.token_rows, values.kv_layout, values.layout_tag) == (False, "NHD", "tiles")


def test_a_tag_says_that_pages_are_in_an_order_of_their_own():
    cache = np.zeros((PAGES, PAGE, HEADS, DIM), np.uint8)
    tiles = KVEntry.from_tensor(0, "k", cache, layout_tag="amx-16x2")
    assert (tiles.token_rows, tiles.layout_tag) == (False, "amx-16x2")
    assert tiles == KVEntry.from_tensor(0, "k", cache, kv_layout="HND", layout_tag="amx-16x2")
    layout = KVLayout([tiles], page_size=PAGE, total_kv_heads=HEADS)
    assert KVLayout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout
    assert len(plan_kv_transfer(layout, layout, [1, 3], [2, 0])) == 2
    other = KVLayout([tiles._replace(layout_tag="")], page_size=PAGE, total_kv_heads=HEADS)
    said = (
        r"^plan_kv_transfer: k of layer 0 must have one layout_tag on both sides, got "
        r'"amx-16x2" at the source and "" at the destination$'
    )
    with pytest.raises(ValueError, match=said):
        plan_kv_transfer(layout, other, [1], [2])
    with pytest.raises(
        ValueError, match=r"layout_tag of k of layer 0 must be .* without token_rows"
    ):
        KVLayout([tiles._replace(token_rows=True)], page_size=PAGE)
    with pytest.raises(
        ValueError, match="layout_tag of k of layer 0 must be at most 40 characters"
    ):
        KVLayout([tiles._replace(layout_tag="t" * 41)], page_size=PAGE)
