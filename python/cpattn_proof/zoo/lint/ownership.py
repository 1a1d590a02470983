# SPDX-License-Identifier: Apache-2.0
"""OWN: tokens that are lost, doubled, or taken for others."""

from __future__ import annotations

from ._documents import Document, columns, document, entry, rows


def _gathered_by_other_groups(mended: bool) -> Document:
    """Two data-parallel groups of two ranks gathered in one order and scattered in another."""
    tokens, outer, inner = 8, 2, 2
    each = tokens // (outer * inner)
    order = [dp * inner + cp for dp in range(outer) for cp in range(inner)]
    back = order if mended else [dp * inner + cp for cp in range(inner) for dp in range(outer)]
    parts = [{"rows": rows([(0, each * place, each)])} for place in range(outer * inner)]
    restore = columns(("rank", "row", "count"), [(rank, 0, each) for rank in back])
    return document(requests=[{"extend": tokens}], ranks=parts, restore=restore)


def _rolled_by_unpadded_lengths(mended: bool) -> Document:
    """Labels are tokens rolled by one within sequences; boundaries did not include padding."""
    real, padded, ranks = [5, 7], [8, 8], 2
    bounds = [0, padded[0]] if mended else [0, real[0]]
    lengths = padded if mended else [real[0], padded[0] + padded[1] - real[0]]
    taken = []
    for begin, length in zip(bounds, lengths, strict=True):
        taken += [begin + (i + 1) % length for i in range(length)]
    wanted = [(i // 8 * 8) + (i + 1) % 8 for i in range(16)]
    parts = []
    for rank in range(ranks):
        held = range(rank * 8, rank * 8 + 8)
        seen = [(_within(taken[i], bounds), 1) for i in held]
        parts.append({
            "rows": rows([(wanted[i] // 8, wanted[i] % 8, 1) for i in held]),
            "positions": columns(("position", "count"), seen),
        })  # fmt: skip
    return document(requests=[{"extend": n} for n in padded], ranks=parts)


def _within(token: int, bounds: list[int]) -> int:
    """Return the position of a token in the sequence that contains it by these bounds."""
    return token - max(bound for bound in bounds if bound <= token)


def _padding_in_the_middle(mended: bool) -> Document:
    """Documents are 1,1,1,0,2,2,0,0 with zeros as padding; lengths alone place it at the end."""
    ids = [1, 1, 1, 0, 2, 2, 0, 0]
    lens = [ids.count(1), ids.count(2)]
    starts = [ids.index(1), ids.index(2)] if mended else [0, lens[0]]
    held = []
    for place, name in enumerate(ids):
        owner = next((i for i, s in enumerate(starts) if s <= place < s + lens[i]), -1)
        said = (owner, place - starts[owner], 1) if owner >= 0 else (-1, 0, 1)
        real = (name - 1, place - ids.index(name), 1) if name else (-1, 0, 1)
        held.append((said, real))
    taken = columns(("position", "count"), [(said[1], 1) for said, _ in held])
    part = {"rows": rows(real for _, real in held), "positions": taken}
    return document(requests=[{"extend": n} for n in lens], ranks=[part])


def _zigzag_undone_twice(mended: bool) -> Document:
    """Ranks have consecutive halves; attention took them for the blocks of a zigzag."""
    tokens, ranks = 16, 2
    block = tokens // (2 * ranks)
    parts = []
    for rank in range(ranks):
        zigzag = [(rank * block, block), ((2 * ranks - 1 - rank) * block, block)]
        held = zigzag if mended else [(rank * tokens // ranks, tokens // ranks)]
        parts.append({
            "rows": rows([(0, *piece) for piece in held]),
            "positions": columns(("position", "count"), zigzag),
        })  # fmt: skip
    return document(requests=[{"extend": tokens}], ranks=parts)


def _contiguous_positions(mended: bool) -> Document:
    """Rows go round robin; a sparse prefill used the positions of consecutive rows."""
    tokens, ranks = 10, 2
    parts = []
    for rank in range(ranks):
        held = range(rank, tokens, ranks)
        begin = rank * len(held)
        taken = list(held) if mended else list(range(begin, begin + len(held)))
        parts.append({
            "rows": rows([(0, token, 1) for token in held]),
            "positions": columns(("position", "count"), [(token, 1) for token in taken]),
        })  # fmt: skip
    return document(requests=[{"extend": tokens}], ranks=parts)


def _restored_as_a_zigzag(mended: bool) -> Document:
    """Ranks have consecutive rows; the batch was put together as if they had a zigzag."""
    tokens, ranks = 8, 2
    each, block = tokens // ranks, tokens // (2 * ranks)
    parts = [{"rows": rows([(0, rank * each, each)])} for rank in range(ranks)]
    zigzag = [(0, 0, block), (1, 0, each), (0, block, block)]
    whole = [(rank, 0, each) for rank in range(ranks)]
    restore = columns(("rank", "row", "count"), whole if mended else zigzag)
    return document(requests=[{"extend": tokens}], ranks=parts, restore=restore)


def _dropped_remainder(mended: bool) -> Document:
    """Nine tokens were cut for two ranks: four each, and one on no rank."""
    tokens, ranks = 9, 2
    size, rest = divmod(tokens, ranks)
    bounds = [rank * size + (min(rank, rest) if mended else 0) for rank in range(ranks + 1)]
    parts = [{"rows": rows([(0, bounds[r], bounds[r + 1] - bounds[r])])} for r in range(ranks)]
    return document(requests=[{"extend": tokens}], ranks=parts)


def _heads(q: int, kv: int, shares: list[list[int]], kv_shares: list[list[int]]) -> Document:
    both = zip(shares, kv_shares, strict=True)
    parts = [{"heads": {"q": own, "kv": keys}} for own, keys in both]
    return document(heads={"q": q, "kv": kv}, ranks=parts)


def _cut(counts: list[int]) -> list[list[int]]:
    """Return consecutive heads for each rank, in these counts."""
    return [list(range(sum(counts[:i]), sum(counts[: i + 1]))) for i in range(len(counts))]


def _stale_head_count(mended: bool) -> Document:
    """Twelve heads were cut for four ranks by the number of KV heads of another layer."""
    q, ranks, stale = 12, 4, 3
    groups = ranks if mended else stale
    counts = [q // groups] * groups + [0] * (ranks - groups)
    return _heads(q, q, _cut([3] * ranks), _cut(counts))


def _heads_padded_apart(mended: bool) -> Document:
    """28 query heads and 7 KV heads were padded separately for two ranks: the ratio is 3.5."""
    q, kv, ranks = 28, 7, 2
    padded_kv = -(-kv // ranks) * ranks
    padded_q = padded_kv * (q // kv) if mended else -(-q // ranks) * ranks
    shares, kv_shares = _cut([padded_q // ranks] * ranks), _cut([padded_kv // ranks] * ranks)
    return _heads(padded_q, padded_kv, shares, kv_shares)


def _fewer_heads_than_ranks(mended: bool) -> Document:
    """Two KV heads were split over four ranks: 1, 1, 0, 0."""
    q, kv, ranks = 8, 2, 4
    kv_shares = [[rank * kv // ranks] for rank in range(ranks)] if mended else _cut([1, 1, 0, 0])
    return _heads(q, kv, _cut([q // ranks] * ranks), kv_shares)


def _weights_of_other_ranks(mended: bool) -> Document:
    """Heads were scattered by one grouping of ranks, projection weights by another."""
    heads, tensor, context = 8, 2, 2
    ranks, each = tensor * context, heads // (tensor * context)
    blocks = _cut([each] * ranks)
    parts = []
    for rank in range(ranks):
        tp, cp = rank % tensor, rank // tensor
        own = blocks[tp * context + cp]
        weights = own if mended else blocks[rank]
        parts.append({"heads": {"q": own, "weights": weights}})
    return document(heads={"q": heads}, ranks=parts)


def _page_of_units_by_the_hash_of_its_first(mended: bool) -> Document:
    """A page of units covers `ratio` pages of tokens; its hash covered only the first of these,
    which two prompts share."""
    page, ratio = 4, 4
    shared, length = page, page * ratio
    hashed = page * ratio if mended else page
    cached = shared // hashed * hashed  # cached tokens of the second request
    tables = [[1], [1 if cached else 2]]
    begins, units = [0, cached // ratio], length // ratio
    writes = columns(
        ("request", "position", "count", "slot"),
        [(i, b, units - b, tables[i][0] * page + b) for i, b in enumerate(begins)],
    )
    return document(
        requests=[{"prefix": begin, "extend": units - begin} for begin in begins],
        cache={"page_size": page, "tables": tables}, ranks=[{"writes": writes}],
    )  # fmt: skip


ENTRIES = [
    entry(
        "vllm-project/vllm-ascend#11921", "OWN",
        "Rows were gathered over one group after the other, and not scattered in reverse.",
        _gathered_by_other_groups, "pull",
    ),
    entry(
        "vllm-project/vllm-ascend#10296", "OWN",
        "A page of compressed units was found by the hash of a part of its tokens.",
        _page_of_units_by_the_hash_of_its_first,
    ),
    entry(
        "NVIDIA/Megatron-LM#4495", "OWN",
        "Tokens were rolled by lengths without padding, over the ends of sequences.",
        _rolled_by_unpadded_lengths,
    ),
    entry(
        "NVIDIA-NeMo/Automodel#3640", "OWN",
        "Padding between sequences was taken to be behind the last.", _padding_in_the_middle,
    ),
    entry(
        "THUDM/slime#1871", "OWN",
        "Data was cut in halves, and attention undid a zigzag.", _zigzag_undone_twice,
    ),
    entry(
        "sgl-project/sglang#27276", "OWN",
        "Sparse prefill took rows that went round robin for consecutive ones.",
        _contiguous_positions,
    ),
    entry(
        "modelscope/ms-swift#10071", "OWN",
        "Consecutive rows were put together in the order of a zigzag.", _restored_as_a_zigzag,
        "pull",
    ),
    entry(
        "deepspeedai/DeepSpeed#7384", "OWN",
        "The remainder of a sequence was on no rank.", _dropped_remainder,
    ),
    entry(
        "deepspeedai/DeepSpeed#8316", "OWN",
        "Heads were shared out by a stale count: 4, 4, 4, 0 for 3, 3, 3, 3.", _stale_head_count,
        "pull",
    ),
    entry(
        "vllm-project/vllm-omni#5716", "OWN",
        "Heads of queries and of keys were padded apart.", _heads_padded_apart, "pull",
    ),
    entry(
        "hiyouga/LlamaFactory#10794", "OWN",
        "Two heads of keys were split over four ranks, of which two had none.",
        _fewer_heads_than_ranks, "pull",
    ),
    entry(
        "NVIDIA/TensorRT-LLM#10350", "OWN",
        "Weights of the output projection were on ranks of other heads.", _weights_of_other_ranks,
        "pull",
    ),
]  # fmt: skip
