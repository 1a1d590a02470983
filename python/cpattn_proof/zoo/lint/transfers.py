# SPDX-License-Identifier: Apache-2.0
"""XFER: descriptors that read or write what they should not."""

from __future__ import annotations

from typing import Any

from ..entry import Shipped
from ._documents import Document, document, entry

_PAGES = 8
_TESTS = "tests_py/integrations/sglang/test_sglang_shipped_transfers.py"


def memory(page_size: int, sizes: list[tuple[int, str, int]], **options: Any) -> dict[str, Any]:
    """Return registered buffers one after another, from (layer, kind, bytes of a page)."""
    entries, addr = [], 4096
    for layer, kind, item_len in sizes:
        nbytes = _PAGES * item_len
        one = {"layer": layer, "kind": kind, "addr": addr, "nbytes": nbytes, "item_len": item_len}
        entries.append(one | options)
        addr += nbytes
    return {"page_size": page_size, "entries": entries, "registered": [[4096, addr - 4096]]}


def transfer(
    blocks: list[tuple[int, int, int]],
    pages: list[int],
    to: str = "decode",
    sender: str = "prefill",
) -> Any:
    """Return descriptors from (source, target, length); page numbers are equal on both sides."""
    src, dst, length = (list(column) for column in zip(*blocks, strict=True))
    return {
        "from": sender, "to": to, "src_pages": pages, "dst_pages": pages,
        "src": src, "dst": dst, "length": length,
    }  # fmt: skip


def page_of(side: dict[str, Any], place: int, page: int) -> int:
    """Return the address at which a page of a buffer begins."""
    buffer = side["entries"][place]
    return int(buffer["addr"] + page * buffer["item_len"])


def _scale_of_another(mended: bool) -> Document:
    """A layer has buffers with 1 and with 8 blocks per page; all ids were multiplied by 8."""
    source = memory(16, [(0, "k", 512), (0, "index_k", 64)])
    blocks = []
    for place, item in ((0, 512), (1, 64)):
        for page in (0, 3):
            begin = page_of(source, place, 0) + page * (item if mended or place else 64 * 8 * 8)
            blocks.append((begin, page_of(source, place, page), item))
    memories = {"prefill": source, "decode": source}
    return document(memories=memories, transfers=[transfer(blocks, [0, 3])])


def _draft_layers(mended: bool) -> Document:
    """Ids of draft layers, which begin at 0 again, were taken for ids of index keys."""
    sizes = [(0, "index_k", 64), (1, "index_k", 64)]
    source, target = memory(16, sizes), memory(16, sizes)
    draft = {"layer": 0, "kind": "index_k", "draft": True, "nbytes": 512, "item_len": 64}
    for side in (source, target):
        side["entries"].append(draft | {"addr": 4096 + 2 * 512})
        side["registered"] = [[4096, 3 * 512]]
    places = [0, 1, 2] if mended else [0, 1, 0]
    blocks = [(page_of(source, i, 2), page_of(target, j, 2), 64) for i, j in enumerate(places)]
    memories = {"prefill": source, "decode": target}
    return document(memories=memories, transfers=[transfer(blocks, [2])])


def _logical_blocks(mended: bool) -> Document:
    """A block of 768 tokens is 12 blocks of the kernel; each was sent with the length of all 12."""
    kernel, ratio = 64, 12
    item = 96 * kernel
    source = {
        "page_size": kernel,
        "entries": [{"layer": 0, "kind": "k", "addr": 0, "nbytes": 24 * item, "item_len": item}],
    }
    pages = list(range(ratio))
    length = item if mended else item * ratio
    blocks = [(page * item, page * item, length) for page in pages]
    memories = {"prefill": source, "decode": source}
    return document(memories=memories, transfers=[transfer(blocks, pages)])


def _head_slices(mended: bool) -> Document:
    """Two heads go to four ranks, so pairs of ranks share a head; a third and fourth were sent."""
    page_size, head, heads, ranks = 4, 16, 2, 4
    source = memory(page_size, [(0, "k", page_size * heads * head)], heads=[0, heads])
    source["registered"] = [[4096, _PAGES * page_size * heads * head]]
    memories, transfers = {"prefill": source}, []
    for rank in range(ranks):
        own = rank * heads // ranks
        target = memory(page_size, [(0, "k", page_size * head)], heads=[own, 1])
        sent = own if mended else rank
        blocks = [
            (page_of(source, 0, 7) + (token * heads + sent) * head,
             page_of(target, 0, 7) + token * head, head)
            for token in range(page_size)
        ]  # fmt: skip
        memories[f"decode {rank}"] = target
        transfers.append(transfer(blocks, [7], f"decode {rank}"))
    return document(memories=memories, transfers=transfers)


def _stages_by_ordinal(mended: bool) -> Document:
    """The second stage has layers 2 and 3; its buffers were paired with decode's layers 0 and 1."""
    source = memory(16, [(2, "k", 512), (3, "k", 512)])
    target = memory(16, [(layer, "k", 512) for layer in range(4)])
    places = (2, 3) if mended else (0, 1)
    blocks = [(page_of(source, i, 1), page_of(target, j, 1), 512) for i, j in enumerate(places)]
    memories = {"prefill": source, "decode": target}
    return document(memories=memories, transfers=[transfer(blocks, [1])])


def _remainder_for_drafts(mended: bool) -> Document:
    """Stages have 7 and 8 of 15 layers; remainders of 15 by these counted as draft layers."""
    target = memory(16, [(layer, kind, 512) for kind in ("k", "v") for layer in range(15)])
    memories, transfers = {"decode": target}, []
    for layers in (range(7), range(7, 15)):
        name = f"stage of {len(layers)}"
        source = memory(16, [(layer, kind, 512) for kind in ("k", "v") for layer in layers])
        values = 15 if mended else len(layers) * (15 // len(layers))
        places = [*layers, *(values + layer for layer in layers)]
        blocks = [(page_of(source, i, 1), page_of(target, j, 1), 512) for i, j in enumerate(places)]
        memories[name] = source
        transfers.append(transfer(blocks, [1], sender=name))
    return document(memories=memories, transfers=transfers)


def _tables_by_place(mended: bool) -> Document:
    """A stage has a table of its layers, decode one of all layers; they were paired by place."""
    sizes = {"k": 512, "index_k": 64}
    kinds = ["k", "index_k", "k", "k"]  # kinds of the second stage's layers, from layer 4 on
    all_kinds = enumerate(["k"] * 4 + kinds)
    target = memory(16, [(layer, kind, sizes[kind]) for layer, kind in all_kinds])
    source = memory(16, [(4 + place, kind, sizes[kind]) for place, kind in enumerate(kinds)])
    blocks = []
    for place, kind in enumerate(kinds):
        to = page_of(target, 4 + place if mended else place, 2)
        blocks.append((page_of(source, place, 2), to, sizes[kind]))
    memories = {"stage 1": source, "decode": target}
    return document(memories=memories, transfers=[transfer(blocks, [2], sender="stage 1")])


def _virtual_pages(mended: bool) -> Document:
    """The allocator moved pages; the sender used their earlier numbers."""
    source = memory(16, [(0, "k", 512)])
    moved = {0: 0, 1: 6, 2: 3}
    numbers = [moved[page] if mended else page for page in moved]
    blocks = [
        (page_of(source, 0, number), page_of(source, 0, page), 512)
        for number, page in zip(numbers, moved, strict=True)
    ]
    sent = transfer(blocks, list(moved)) | {"src_pages": list(moved.values())}
    return document(memories={"prefill": source, "decode": source}, transfers=[sent])


def _pages_of_an_aborted_request(mended: bool) -> Document:
    """Decode reused pages of an aborted request while its writer still had them; both wrote."""
    source, pages = memory(16, [(0, "k", 512)]), {"aborted": [2, 3], "next": [4, 5]}
    transfers = []
    for own in pages.values():
        to = own if mended else pages["aborted"]
        blocks = [
            (page_of(source, 0, read), page_of(source, 0, written), 512)
            for read, written in zip(own, to, strict=True)
        ]
        transfers.append(transfer(blocks, own) | {"dst_pages": to})
    return document(memories={"prefill": source, "decode": source}, transfers=transfers)


def _values_as_wide_as_keys(mended: bool) -> Document:
    """Rows of values are narrower than rows of keys; the pool had them equally wide."""
    page_size, key, value = 4, 192, 128
    sizes = [(layer, "k", page_size * key) for layer in range(2)]
    target = memory(page_size, sizes + [(i, "v", page_size * value) for i in range(2)])
    width = value if mended else key
    source = memory(page_size, sizes + [(i, "v", page_size * width) for i in range(2)])
    blocks = []
    for place, buffer in enumerate(source["entries"]):
        begin = target["entries"][place]["addr"] + 5 * buffer["item_len"]  # the sender's length
        blocks.append((page_of(source, place, 5), begin, buffer["item_len"]))
    memories = {"prefill": source, "decode": target}
    return document(memories=memories, transfers=[transfer(blocks, [5])])


ENTRIES = [
    entry(
        "vllm-project/vllm-ascend#13965", "XFER",
        "Keys were read with the blocks per page of the index keys.", _scale_of_another, "pull",
    ),
    entry(
        "vllm-project/vllm-ascend#13778", "XFER",
        "Draft layers were sent into the index keys of the first layers.", _draft_layers, "pull",
    ),
    entry(
        "vllm-project/vllm#54272", "XFER",
        "Each block of the kernel was sent with the length of a logical block, 12 times its own.",
        _logical_blocks, "pull",
    ),
    entry(
        "sgl-project/sglang#31968", "XFER",
        "Four slices were cut of two heads, past what is registered.", _head_slices, "pull",
    ),
    entry(
        "sgl-project/sglang#32270", "XFER",
        "Buffers of pipeline stages were paired by their numbers, not by layers.",
        _stages_by_ordinal, "pull",
    ),
    entry(
        "vllm-project/vllm-ascend#15900", "XFER",
        "Tables of a stage and of decode were paired by place; their layers differ.",
        _tables_by_place, "pull",
    ),
    entry(
        "sgl-project/sglang#31471", "XFER",
        "Numbers of pages from before the pool was compacted were sent.", _virtual_pages, "pull",
    ),
    entry(
        "sgl-project/sglang#24527", "XFER",
        "Pages of an aborted request were given to the next while they were still written.",
        _pages_of_an_aborted_request,
    ),
    entry(
        "sgl-project/sglang#27740", "XFER",
        "A remainder of layers over stages was taken for draft layers.", _remainder_for_drafts,
        shipped=Shipped(
            "sglang 0.5.23",
            "`AscendKVManager.send_kvcache` with its `get_mha_kv_ptrs_with_pp`, between pools of "
            "its `KVCacheConfigurator`: stages of 7 and 8 layers, a decode of 15",
            "descriptor 14 writes v of layer 0 into k of layer 14",
            "the plug-in's part `strict_kv`", _TESTS,
        ),
    ),
    entry(
        "sgl-project/sglang#39058", "XFER",
        "Buffers of values were as wide as those of keys.", _values_as_wide_as_keys,
        shipped=Shipped(
            "sglang 0.5.23",
            "`KVCacheConfigurator._build_ascend_mha_kv_pool`, and `send_kvcache` from this pool to "
            "that of its `_build_mha_kv_pool`, for keys of 192 and values of 128",
            "descriptor 4 writes page 5 of decode, which is none of the sequence",
            "the same builder that hands `v_head_dim` on", _TESTS,
        ),
    ),
]  # fmt: skip
