# SPDX-License-Identifier: Apache-2.0
"""Bugs at borders between ranks, chunks and windows: something was not carried over."""

from __future__ import annotations

from ._documents import Document, columns, document, entry, rows
from .transfers import transfer


def _state_begins_anew(mended: bool) -> Document:
    """A layer with a state scans the tokens of a rank; the second rank began with empty state."""
    size, ranks = 8, 2
    parts = []
    for rank in range(ranks):
        begin = rank * size
        parts.append(
            {
                "rows": rows([(0, begin, size)]),
                "positions": columns(("position", "count"), [(begin if mended else 0, size)]),
            }
        )
    return document(requests=[{"extend": ranks * size}], ranks=parts)


def _overlap_lost(mended: bool) -> Document:
    """Four tokens become one unit, which also sees the previous four; decoding saw only four."""
    ratio, length = 4, 20
    last = length - 1
    first = length - 2 * ratio if mended else length - ratio
    call = columns(("request", "row", "rows", "keys", "first"), [(0, 0, 1, length - first, first)])
    return document(
        requests=[{"prefix": last, "extend": 1}], attention={"window": 2 * ratio - 1},
        ranks=[{"rows": rows([(0, last, 1)]), "segments": call}],
    )  # fmt: skip


def _candidates_shared_out(mended: bool) -> Document:
    """Each of P ranks kept k / P of k keys, but all the best keys may be on one rank."""
    keys, ranks, k = 16, 2, 4
    scores = [key if key % ranks == 0 else -key for key in range(keys)]  # rank 0 has the best
    parts = []
    for rank in range(ranks):
        own = sorted(range(rank, keys, ranks), key=lambda key: -scores[key])[: k // ranks]
        best = sorted(range(keys), key=lambda key: -scores[key])[:k]
        chosen = [key for key in best if key % ranks == rank] if mended else own
        lines = [(0, keys - 1, key, key // ranks) for key in sorted(chosen)]
        names = ("request", "position", "key", "index")
        parts.append({"selections": columns(names, lines)})
    return document(
        requests=[{"prefix": keys - 1, "extend": 1}], cache={"page_size": 1, "shards": ranks},
        topk={"k": k, "scores": [{"request": 0, "position": keys - 1, "scores": scores}]},
        ranks=parts,
    )  # fmt: skip


def _across_two_chunks(mended: bool) -> Document:
    """A rank has the first and the last chunk of new tokens next to each other. A block of keys
    that begins in the first chunk was copied in one piece, over the border between them."""
    chunk, token, block = 8, 64, 8
    buffer = {"layer": 0, "kind": "k", "nbytes": 4 * chunk * token, "item_len": chunk * token}
    source = {"page_size": chunk, "entries": [buffer | {"addr": 0}]}
    target = {"page_size": chunk, "entries": [buffer | {"addr": 1 << 16}]}
    begin, rest = 4, 4  # tokens of the first chunk before the block, and in the block
    blocks = [(begin * token, (1 << 16) + begin * token, block * token)]
    if mended:
        blocks = [
            (begin * token, (1 << 16) + begin * token, rest * token),
            (3 * chunk * token, (1 << 16) + chunk * token, rest * token),
        ]
    moved = transfer(blocks, [0, 3]) | {"dst_pages": [0, 1], "partial": True}
    return document(memories={"prefill": source, "decode": target}, transfers=[moved])


def _owner_of_the_first(mended: bool) -> Document:
    """Decoded tokens go to ranks by pages; for step 0 the page was -1, which is the last rank's."""
    page, ranks, prompt = 4, 2, 8
    parts = []
    for rank in range(ranks):
        step = 0
        owner = (max(1, step) - 1 if mended else step - 1) // page % ranks
        own = prompt // ranks + (1 if owner == rank else 0)
        parts.append({"key_lens": [own]})
    return document(
        requests=[{"prefix": prompt, "extend": 1}],
        cache={"page_size": page, "shards": ranks, "interleave": page}, ranks=parts,
    )  # fmt: skip


def _tokens_of_all_ranks(mended: bool) -> Document:
    """A step has 44 tokens, 22 on each of two ranks; a rank ran with the number of both."""
    size, ranks = 22, 2
    parts = []
    for rank in range(ranks):
        begin = rank * size
        count = size if mended else ranks * size
        call = columns(("request", "row", "rows", "keys"), [(0, 0, count, begin + size)])
        parts.append({"rows": rows([(0, begin, size)]), "segments": call})
    return document(requests=[{"extend": ranks * size}], ranks=parts)


ENTRIES = [
    entry(
        "vllm-project/vllm-ascend#9479", "OWN",
        "The state of a linear attention began anew on every rank.", _state_begins_anew, "pull",
    ),
    entry(
        "jundot/omlx#2271", "COV",
        "A compressor lost the window before in decoding.", _overlap_lost, "pull",
    ),
    entry(
        "vllm-project/vllm#57438", "TOPK",
        "Ranks may not share out k candidates: each needs k of its own.", _candidates_shared_out,
        "pull",
    ),
    entry(
        "vllm-project/tpu-inference#3425", "XFER",
        "A block of keys was copied in one piece across two chunks.", _across_two_chunks, "pull",
    ),
    entry(
        "NVIDIA/TensorRT-LLM#17795", "LEN",
        "The first decoded token fell to the last rank, for want of a clamp.", _owner_of_the_first,
        "pull",
    ),
    entry(
        "vllm-project/vllm-ascend#16853", "LEN",
        "A rank ran with the number of tokens of all ranks.", _tokens_of_all_ranks, "pull",
    ),
]  # fmt: skip
