# SPDX-License-Identifier: Apache-2.0
"""LEN: lengths and pages that do not belong to the rank."""

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


def _global_pages(mended: bool) -> Document:
    """Pages of a decode step were counted from the length of the sequence, not the rank's."""
    lens, page_size, ranks = [70, 33], 16, 2
    parts = []
    for rank in range(ranks):
        own = [local_length(length, rank, ranks) for length in lens]
        planned = own if mended else lens
        calls = columns(_SEGMENTS, [(i, i, 1, keys) for i, keys in enumerate(planned)])
        tables = [[10 * i + page for page in range(-(-n // page_size))] for i, n in enumerate(own)]
        parts.append({"rows": decode_rows(lens), "segments": calls, "tables": tables})
    return document(
        requests=decode_requests(lens), queries="all", ranks=parts,
        cache={"page_size": page_size, "shards": ranks},
    )  # fmt: skip


def _long_prefix_hit(mended: bool) -> Document:
    """A cached block has 16 tokens on each of two ranks, so 32 of the sequence, not 16."""
    block, ranks, common, length = 16, 2, 150, 550
    span = block * ranks
    hashed = span if mended else block  # tokens that one hash covers
    shared = common // hashed
    first = list(range(1, -(-length // span) + 1))
    second = first[:shared] + [100 + page for page in first[shared:]]
    tables = {"tables": [first, second]}
    lens = [{"extend": length}, {"extend": length, "shares": {"request": 0, "tokens": common}}]
    return document(
        requests=lens, queries="all", cache={"page_size": block, "shards": ranks},
        ranks=[dict(tables) for _ in range(ranks)],
    )  # fmt: skip


def _compact_index(mended: bool) -> Document:
    """Lengths without empty shards were indexed by the number of the request."""
    lens, interleave, ranks = [256, 128, 256], 128, 2
    own = [local_length(length, 1, ranks, interleave) for length in lens]
    compact = [length for length in own if length]
    starts = [sum(compact[:i]) for i in range(len(compact) + 1)]
    ends = [
        starts[min(i + 1, len(compact))] - starts[min(i, len(compact))] for i in range(len(lens))
    ]
    parts = [
        {"key_lens": [local_length(length, 0, ranks, interleave) for length in lens]},
        {"key_lens": own if mended else ends},
    ]
    cache = {"page_size": 128, "shards": ranks, "interleave": interleave}
    requests = [{"prefix": length, "extend": 0} for length in lens]
    return document(requests=requests, ranks=parts, cache=cache)


def _small_chunk(mended: bool) -> Document:
    """The last chunk of a prefill is as short as a decode step, and was planned as one."""
    cached, chunk, drafts = 64, 3, 3
    is_decode = chunk <= drafts + 1 and not mended
    lens, total = [cached + chunk], cached + drafts + 1
    keys = total if is_decode else cached + chunk  # a decode step counts its token and the drafts
    calls = columns(_SEGMENTS, [(0, 0, chunk, keys)])
    requests = [{"prefix": lens[0] - chunk, "extend": chunk}]
    return document(
        requests=requests, ranks=[{"rows": rows([(0, cached, chunk)]), "segments": calls}]
    )


def _unaligned_chunks(mended: bool) -> Document:
    """Context comes in chunks; only aligned chunks have an equal part on every rank."""
    context, block, ranks = 896, 128, 4
    unit = block * ranks if mended else block
    budget = 384 if not mended else 512
    chunk = budget // unit * unit
    begins = range(0, context, chunk)
    lens = []
    for rank in range(ranks):
        total = 0
        for begin in begins:
            size = min(chunk, context - begin)
            total += local_length(size, rank, ranks, block)  # assumes that a chunk begins at rank 0
        lens.append(total)
    cache = {"page_size": block, "shards": ranks, "interleave": block}
    requests = [{"prefix": context, "extend": 0}]
    return document(requests=requests, ranks=[{"key_lens": [n]} for n in lens], cache=cache)


def _offsets_of_positions(mended: bool) -> Document:
    """Offsets of sequences were made from positions, which do not begin at 0 on rank 1."""
    size, ranks = 1024, 2
    parts = []
    for rank in range(ranks):
        begin = rank * size
        first, count = (0, size) if mended else (begin, begin + size)
        calls = columns(_SEGMENTS, [(0, first, count, begin + size)])
        parts.append({"rows": rows([(0, begin, size)]), "segments": calls})
    return document(requests=[{"extend": ranks * size}], ranks=parts)


def _whole_warm_up(mended: bool) -> Document:
    """Metadata of a warm-up counted all decodes of the batch; a rank has only its share."""
    lens, ranks = [17, 9, 33, 5, 12, 21], 2
    parts = []
    for rank in range(ranks):
        own = range(rank, len(lens), ranks)
        planned = own if mended else range(len(lens))
        calls = columns(_SEGMENTS, [(i, row, 1, lens[i]) for row, i in enumerate(planned)])
        parts.append({"rows": rows([(i, lens[i] - 1, 1) for i in own]), "segments": calls})
    return document(requests=decode_requests(lens), ranks=parts)


ENTRIES = [
    entry(
        "vllm-project/vllm#48003", "LEN",
        "Pages were planned from global lengths under decode context parallelism.", _global_pages,
    ),
    entry(
        "vllm-project/vllm#26296", "LEN",
        "The hash of a prefix ignored that a block stands for tokens of all ranks.",
        _long_prefix_hit, "pull",
    ),
    entry(
        "vllm-project/vllm-ascend#11807", "LEN",
        "An empty shard shifted the lengths of the requests behind it.", _compact_index, "pull",
    ),
    entry(
        "vllm-project/vllm-ascend#10580", "LEN",
        "The last small chunk of a prefill was planned as a decode step.", _small_chunk, "pull",
    ),
    entry(
        "vllm-project/vllm-ascend#5767", "LEN",
        "Chunks of context were aligned to a block, not to a block of every rank.",
        _unaligned_chunks, "pull",
    ),
    entry(
        "PrimeIntellect-ai/prime-rl#2392", "LEN",
        "Offsets of a rank's rows began at the position of the first.", _offsets_of_positions,
        "pull",
    ),
    entry(
        "vllm-project/vllm#49810", "LEN",
        "A warm-up was not shared out: its metadata counted the decode rows of all ranks.",
        _whole_warm_up,
    ),
]  # fmt: skip
