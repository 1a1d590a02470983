# SPDX-License-Identifier: Apache-2.0
"""COV: queries that miss keys. TOPK: selections that miss keys."""

from __future__ import annotations

from ._documents import (
    Document,
    columns,
    decode_requests,
    decode_rows,
    document,
    entry,
    local_length,
    rows,
)

_SEGMENTS = ("request", "row", "rows", "keys")


def _verify_rows(mended: bool) -> Document:
    """Each row of draft tokens sees one key less than the next, on one rank; all dropped one."""
    length, queries, ranks = 21, 3, 2
    parts = []
    for rank in range(ranks):
        whole = local_length(length, rank, ranks)
        calls = []
        for row in range(queries):
            behind = queries - 1 - row
            own = local_length(length - behind, rank, ranks)
            calls.append((0, row, 1, own if mended else whole - behind))
        parts.append(
            {"rows": decode_rows([length], queries), "segments": columns(_SEGMENTS, calls)}
        )
    return document(
        requests=decode_requests([length], queries), queries="all", ranks=parts,
        cache={"page_size": 16, "shards": ranks},
    )  # fmt: skip


def _own_key_dropped(mended: bool) -> Document:
    """The rank with the key of query P masked pos < P instead of pos <= P."""
    length, interleave, ranks = 37, 4, 2
    position = length - 1
    parts = []
    for rank in range(ranks):
        kept = [t for t in range(length) if t // interleave % ranks == rank]
        seen = sum(t <= position if mended else t < position for t in kept)
        calls = columns(_SEGMENTS, [(0, 0, 1, seen)])
        parts.append({"rows": decode_rows([length]), "segments": calls})
    return document(
        requests=decode_requests([length]), queries="all", ranks=parts,
        cache={"page_size": 16, "shards": ranks, "interleave": interleave},
    )  # fmt: skip


def _divided_offsets(mended: bool) -> Document:
    """698 tokens are padded to 704 over four ranks; keys of a rank were counted as 698 // 4."""
    real, padded, ranks = 698, 704, 4
    block = padded // (2 * ranks)
    blocks = {rank: (rank, 2 * ranks - 1 - rank) for rank in range(ranks)}
    parts = []
    for rank in range(ranks):
        held = [(0, b * block, block) for b in blocks[rank]]
        have = sum(max(min(real - begin, block), 0) for _, begin, _ in held)
        calls = []
        for source in range(ranks):
            keys = sum(max(min(real - b * block, block), 0) for b in blocks[source])
            keys = keys if mended else real // ranks
            if source == rank:
                calls.append((0, 0, have, keys, 1, source))
            elif source < rank:  # all rows see the first block of that rank
                calls.append((0, 0, have, min(block, keys), 0, source))
            else:  # the second block sees all keys of that rank
                calls.append((0, block, have - block, keys, 0, source))
        segments = columns((*_SEGMENTS, "step", "from"), calls)
        parts.append({"rows": rows(held), "segments": segments})
    return document(requests=[{"extend": real, "pad": padded - real}], ranks=parts)


def _rows_before_the_exchange(mended: bool) -> Document:
    """A rank has all rows of some heads after an exchange; attention used their earlier number."""
    tokens, ranks, heads = 16, 4, 8
    each = heads // ranks
    count = tokens if mended else tokens // ranks
    part = {"rows": rows([(0, 0, tokens)]), "segments": columns(_SEGMENTS, [(0, 0, count, count)])}
    own = [list(range(rank * each, (rank + 1) * each)) for rank in range(ranks)]
    return document(
        requests=[{"extend": tokens}], queries="all", heads={"q": heads},
        ranks=[part | {"heads": {"q": share}} for share in own],
    )  # fmt: skip


def _lost_window(mended: bool) -> Document:
    """Cutting the sequences replaced a mask with a window by a causal one."""
    length, window, ranks = 256, 127, 2
    names = (*_SEGMENTS, "window")
    parts = []
    for rank in range(ranks):
        count = length // ranks
        call = (0, 0, count, (rank + 1) * count, window if mended else -1)
        parts.append({
            "rows": rows([(0, rank * count, count)]), "segments": columns(names, [call])
        })  # fmt: skip
    return document(requests=[{"extend": length}], attention={"window": window}, ranks=parts)


def _global_ids(mended: bool) -> Document:
    """Selected keys are positions in the sequence, but were looked up in the table of a rank."""
    length, k, ranks = 40, 6, 2
    chosen = [3, 8, 17, 26, 30, 39]
    parts = []
    for rank in range(ranks):
        lines = []
        for key in chosen:
            if not mended:
                lines.append((0, length - 1, key, key) if key % ranks == rank else None)
            elif key % ranks == rank:
                lines.append((0, length - 1, key, key // ranks))
        known = [line for line in lines if line]
        names = ("request", "position", "key", "index")
        parts.append({"selections": columns(names, known)})
    return document(
        requests=decode_requests([length]), queries="all", topk={"k": k}, ranks=parts,
        cache={"page_size": 16, "shards": ranks},
    )  # fmt: skip


def _overfull_bucket(mended: bool) -> Document:
    """A bucket had slots for some candidates; later ones, which are all better, were lost."""
    count, k, slots = 600, 128, 512
    scores = list(range(count))
    candidates = range(count) if mended else range(slots)
    chosen = sorted(candidates, key=lambda key: -scores[key])[:k]
    names = ("request", "position", "key", "index")
    selected = columns(names, [(0, count - 1, key, key) for key in sorted(chosen)])
    scored = [{"request": 0, "position": count - 1, "scores": scores}]
    return document(
        requests=decode_requests([count]), topk={"k": k, "scores": scored},
        ranks=[{"selections": selected}],
    )  # fmt: skip


ENTRIES = [
    entry(
        "vllm-project/vllm#47181", "COV",
        "Rows to verify saw local(G) - k keys, which is not local(G - k).", _verify_rows, "pull",
    ),
    entry(
        "vllm-project/vllm-ascend#11849", "COV",
        "The rank that keeps a query's own key hid it.", _own_key_dropped, "pull",
    ),
    entry(
        "NVIDIA/TransformerEngine#3331", "COV",
        "Offsets of sequences were divided by the ranks: real keys of padded ones were dropped.",
        _divided_offsets,
    ),
    entry(
        "NVIDIA/TensorRT-LLM#13486", "COV",
        "Attention behind an all-to-all was called for as many rows as there were before it.",
        _rows_before_the_exchange, "pull",
    ),
    entry(
        "huggingface/accelerate#4177", "COV",
        "Masks with windows were replaced by causal ones under context parallelism.",
        _lost_window,
    ),
    entry(
        "vllm-project/vllm#54541", "TOPK",
        "Selected positions of the sequence were looked up in the table of a rank.", _global_ids,
    ),
    entry(
        "local-inference-lab/b12x#55", "TOPK",
        "Candidates beyond the slots of a bucket were lost.", _overfull_bucket, "pull",
    ),
]  # fmt: skip
