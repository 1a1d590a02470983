# SPDX-License-Identifier: Apache-2.0
"""Five bugs of context parallelism on Ascend with which this project began."""

from __future__ import annotations

from ..entry import Shipped
from ._documents import Document, columns, decode_requests, document, entry, rows
from .transfers import memory, page_of, transfer

_SELECTIONS = ("request", "position", "key", "index")
_TESTS = "tests_py/integrations/sglang/test_sglang_bugs{}.py"


def _blocks(length: int, ranks: int) -> list[int]:
    """Return the sizes of the blocks of a zigzag."""
    size, rest = divmod(length, 2 * ranks)
    return [size + (block < rest) for block in range(2 * ranks)]


def _halved_rows(mended: bool) -> Document:
    """A rank's rows, from two blocks of each sequence, were halved; the halves served as blocks."""
    lens, ranks = [5, 5], 2
    parts = []
    for rank in range(ranks):
        held, calls, row = [], [], 0
        for block in (rank, 2 * ranks - 1 - rank):
            for request, length in enumerate(lens):
                sizes = _blocks(length, ranks)
                held.append((request, sum(sizes[:block]), sizes[block]))
        half = (sum(count for *_, count in held) + 1) // 2
        for place, (request, begin, count) in enumerate(held):
            if place == len(lens) and not mended:
                row = half
            calls.append((request, row, count, begin + count))
            row += count
        segments = columns(("request", "row", "rows", "keys"), calls)
        parts.append({"rows": rows(held), "segments": segments})
    return document(requests=[{"extend": length} for length in lens], ranks=parts)


def _forgotten_prefix(mended: bool) -> Document:
    """The indexer counted the new keys, and took that many from the start of the sequence."""
    prefix, extend, ranks, k = 12, 8, 2, 4
    blocks = _blocks(extend, ranks)
    scores = [(7 * key) % 23 for key in range(prefix + extend)]
    parts, scored = [], []
    for rank in range(ranks):
        lines = []
        for block in (rank, 2 * ranks - 1 - rank):
            begin = prefix + sum(blocks[:block])
            for position in range(begin, begin + blocks[block]):
                count = position + 1 - (0 if mended else prefix)
                best = sorted(range(count), key=lambda key: -scores[key])[:k]
                lines += [(0, position, key, key) for key in sorted(best)]
                scored.append({"request": 0, "position": position, "scores": scores})
        parts.append({"selections": columns(_SELECTIONS, lines)})
    requests = [{"prefix": prefix, "extend": extend}]
    return document(requests=requests, topk={"k": k, "scores": scored}, ranks=parts)


def _ragged_decode(mended: bool) -> Document:
    """A decode step, which has only tables, selected rows of concatenated sequences."""
    lens, k = [29, 18], 4
    starts = [0, 0] if mended else [0, lens[0]]
    lines = []
    for request, (length, start) in enumerate(zip(lens, starts, strict=True)):
        for key in range(length - k, length):
            lines.append((request, length - 1, key, start + key))
    return document(
        requests=decode_requests(lens), topk={"k": k},
        ranks=[{"selections": columns(_SELECTIONS, lines)}],
    )  # fmt: skip


def _token_for_page(mended: bool) -> Document:
    """The length of a page was the length of one token, as buffers are lists of tokens."""
    page_size, num_pages, token = 8, 8, 64
    page = page_size * token
    side = memory(page_size, [(0, "k", page), (0, "v", page)]) | {"num_pages": num_pages}
    if not mended:
        side["entries"] = [entry | {"item_len": token} for entry in side["entries"]]
    blocks = [(page_of(side, i, 3), page_of(side, i, 3), page if mended else token) for i in (0, 1)]
    memories = {"prefill": side, "decode": side}
    return document(memories=memories, transfers=[transfer(blocks, [3])])


def _groups_halved(mended: bool) -> Document:
    """Keys, rotary parts and index keys of a stage were sent as if they were keys and values."""
    sizes = [("k", 512), ("v", 64), ("index_k", 128)]
    first, stage, layers = 2, 2, 4
    groups = len(sizes)
    source = memory(16, [(first + i, kind, size) for kind, size in sizes for i in range(stage)])
    target = memory(16, [(layer, kind, size) for kind, size in sizes for layer in range(layers)])
    if mended:
        places = [group * layers + first + i for group in range(groups) for i in range(stage)]
    else:
        mine, theirs = groups * stage // 2, groups * layers // 2
        places = [half * theirs + first + i for half in (0, 1) for i in range(mine)]
    blocks = [
        (page_of(source, i, 1), page_of(target, place, 1), source["entries"][i]["item_len"])
        for i, place in enumerate(places)
    ]
    memories = {"prefill": source, "decode": target}
    return document(memories=memories, transfers=[transfer(blocks, [1])])


ENTRIES = [
    entry(
        "sgl-project/sglang#26705", "COV",
        "Rows of two blocks of several sequences were halved in the middle.", _halved_rows, "pull",
    ),
    entry(
        "sgl-project/sglang#23268", "TOPK",
        "The indexer forgot the cached prefix under context parallelism.", _forgotten_prefix,
        "pull",
        Shipped(
            "sglang 0.5.10",
            "`Indexer.forward_npu` on two ranks, a prefix of 77 and 50 new tokens; matrices, "
            "rotations and the all-gather are the test's, `npu_lightning_indexer` is cpattn's",
            "query 77 of request 0 selects 1 keys over all ranks, not 8",
            "the same of 0.5.12", _TESTS.format("_dsa"),
        ),
    ),
    entry(
        "sgl-project/sglang#20606", "TOPK",
        "A decode step selected rows of a concatenation that it has not.", _ragged_decode, "pull",
    ),
    entry(
        "sgl-project/sglang#15852", "XFER",
        "The length of a page was that of a token.", _token_for_page, "pull",
        Shipped(
            "sglang 0.5.9", "`NPUMHATokenToKVPool.get_contiguous_buf_infos` with `ASCEND_USE_FIA`",
            "k of layer 0 of source has 72 pages of 64 bytes, not 9",
            "the same of 0.5.10", _TESTS.format(""),
        ),
    ),
    entry(
        "sgl-project/sglang#23893", "XFER",
        "Buffers of three kinds were sent as if they were of two.", _groups_halved, "pull",
        Shipped(
            "sglang 0.5.11", "`AscendKVManager.send_kvcache` of a stage with three kinds of "
            "buffers; 0.5.18 with two and a draft layer says the same",
            "descriptor 2 writes v of layer 2 into v of layer 0",
            "`cpattn.transfer.sglang_0_5_23.get_mla_kv_ptrs_with_pp`", _TESTS.format(""),
        ),
    ),
]  # fmt: skip
