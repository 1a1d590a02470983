# SPDX-License-Identifier: Apache-2.0
"""Who owns which tokens, and what work follows from it."""

from __future__ import annotations

import numpy as np

import cpattn
from cpattn_lab.cost_model import rank_work

from .canvas import Canvas

LEFT = 20


def owners_of(plans: list[cpattn.ContextParallelMetadata]) -> list[int]:
    """The rank of every new token, in the order of the batch."""
    owners = np.empty(plans[0].total_seq_lens, dtype=int)
    for plan in plans:
        owners[plan.local_q_indices] = plan.cp_rank
    return [int(rank) for rank in owners]


def keys_of(plans: list[cpattn.ContextParallelMetadata]) -> list[int]:
    """How many keys every new token sees."""
    keys = np.empty(plans[0].total_seq_lens, dtype=int)
    for plan in plans:
        keys[plan.local_q_indices] = plan.query_cache_lengths
    return [int(count) for count in keys]


def blocks_of(plans: list[cpattn.ContextParallelMetadata]) -> list[tuple[int, int, int]]:
    """Begin, end and owner of each block of tokens, in the order of the batch."""
    owners, begin, blocks = owners_of(plans), 0, []
    for length in plans[0].split_list or [1] * len(owners):
        if length:
            blocks.append((begin, begin + length, owners[begin]))
        begin += length
    return blocks


def zigzag_prefix() -> str:
    prefix, new, ranks = 8, 24, 4
    plans = {
        name: cpattn.build_cp_metadata_all_ranks(
            [new], [prefix + new], cp_size=ranks, strategy=name
        )
        for name in ("zigzag", "contiguous")
    }
    works = {name: rank_work([new], [prefix + new], cp_size=ranks, strategy=name) for name in plans}
    picture = Canvas(
        "Zigzag with a cached prefix",
        f"A prompt of {prefix + new} tokens over {ranks} ranks; {prefix} are cached. Zigzag gives "
        f"each rank an early and a late block of the new tokens, and "
        f"{works['zigzag'].pairs[0]} query-key pairs; contiguous blocks give from "
        f"{works['contiguous'].pairs.min()} to {works['contiguous'].pairs.max()}.",
    )
    picture.text(
        LEFT, 24, f"{prefix} cached and {new} new tokens of one prompt, over {ranks} ranks:", "bold"
    )
    token, top = 660 / (prefix + new), 36
    picture.cached(LEFT, top, prefix * token, 32, "cached prefix")
    start = LEFT + prefix * token
    for a, b, rank in blocks_of(plans["zigzag"]):
        picture.block(
            start + a * token, top, (b - a) * token, 32, f"rank {rank}", f"r{rank}", bold=True
        )
    half = new / 2 * token
    picture.brace(LEFT, top + 36, prefix * token, "all ranks read it")
    picture.brace(start, top + 36, half, "each rank's prev block …")
    picture.brace(start + half, top + 36, half, "… and its next block")
    most = int(max(work.pairs.max() for work in works.values()))
    says = {
        "zigzag": "every rank has the same work",
        "contiguous": f"the last rank has {works['contiguous'].imbalance:.2f} × its share",
    }
    for column, (name, work) in enumerate(works.items()):
        x, y, cell = LEFT + 20 + column * 342, 156, 9.0
        picture.text(x, y - 24, name, "bold")
        picture.text(x + picture.width_of(name) + 6, y - 24, says[name])
        picture.text(x, y - 6, "keys →", "soft")
        picture.text(x - 8, y + 62, "← queries", "soft", turn=-90)
        keys = keys_of(plans[name])
        picture.triangle(x, y, cell, owners_of(plans[name]), keys, prefix)
        y += new * cell + 12
        unit = 200 / most
        for rank, pairs in enumerate(work.pairs):
            picture.text(x, y + 13, f"rank {rank}")
            picture.rect(x + 50, y, pairs * unit, 17, f"r{rank}")
            picture.text(x + 55, y + 13, f"{pairs} pairs")
            y += 21
        mean = x + 50 + work.pairs.mean() * unit
        picture.line((mean, y - 88), (mean, y + 2), dashed=True)
        picture.text(mean, y + 15, "mean", "soft", anchor="middle")
    picture.text(
        LEFT + 20,
        y + 38,
        "A pair is a query and a key that it sees: the work of attention. Cached keys are hatched.",
    )
    return picture.finish()


HOW = {
    "zigzag": "blocks 0 1 2 3 3 2 1 0 of each sequence",
    "interleave": "token t of the batch to rank t mod 4",
    "contiguous": "blocks 0 1 2 3 of each sequence",
}


def strategies() -> str:
    extends, lengths, ranks = [16, 8], [24, 8], 4
    picture = Canvas(
        "Zigzag, interleave and contiguous",
        "The same two sequences over four ranks by three strategies. Zigzag and interleave give "
        "the ranks nearly the same number of query-key pairs, contiguous does not.",
    )
    cell, y = 14.0, 20.0
    for name, how in HOW.items():
        plans = cpattn.build_cp_metadata_all_ranks(extends, lengths, cp_size=ranks, strategy=name)
        work = rank_work(extends, lengths, cp_size=ranks, strategy=name)
        picture.text(LEFT, y, name, "bold")
        picture.text(LEFT + picture.width_of(name) + 8, y, how)
        x, begin, owners = float(LEFT), 0, owners_of(plans)
        for i, (new, length) in enumerate(zip(extends, lengths, strict=True)):
            if prefix := length - new:
                picture.cached(x, y + 12, prefix * cell, 32, "cached")
            x += prefix * cell
            for token in range(begin, begin + new):
                rank = owners[token]
                picture.rect(x, y + 12, cell, 32, f"r{rank}")
                picture.text(x + cell / 2, y + 32.5, f"{rank}", "small", anchor="middle")
                x += cell
            left = x - length * cell
            picture.brace(left, y + 48, length * cell, f"sequence {'AB'[i]}")
            x += 14
            begin += new
        unit = 92 / 156
        for rank, pairs in enumerate(work.pairs):
            top = y - 10 + rank * 20
            picture.text(520, top + 13, f"{rank}", anchor="end")
            picture.rect(528, top, pairs * unit, 16, f"r{rank}")
            picture.text(528 + pairs * unit + 5, top + 13, f"{pairs} pairs")
        picture.text(510, y + 84, f"busiest: {work.imbalance:.2f} × the mean", "soft")
        y += 124
    return picture.finish()


def prefixes() -> str:
    prefix, new, ranks, rank = 8, 16, 4, 1
    baked, bare = (
        cpattn.build_cp_metadata(
            [new], [prefix + new], cp_rank=rank, cp_size=ranks, kv_len_convention=convention
        )
        for convention in ("baked", "bare")
    )
    plans = cpattn.build_cp_metadata_all_ranks([new], [prefix + new], cp_size=ranks)
    picture = Canvas(
        "Baked and bare prefixes",
        f"The lengths of keys of rank {rank}: baked ones count the {prefix} cached tokens, bare "
        f"ones do not, and who reads them has to add the prefix, once.",
    )
    cell, x0, y = 22.0, 150.0, 20.0
    picture.text(LEFT, y + 22, "tokens")
    picture.cached(x0, y, prefix * cell, 32, "cached prefix")
    start = x0 + prefix * cell
    for a, b, owner in blocks_of(plans):
        kind = f"r{rank}" if owner == rank else "plain"
        words = ("prev" if a < new / 2 else "next") if owner == rank else f"{owner}"
        picture.block(start + a * cell, y, (b - a) * cell, 32, words, kind, bold=owner == rank)
    picture.text(start, y + 50, f"blocks of rank {rank}, and those of the others", "soft")

    def bar(y: float, begin: int, length: int, label: str, kind: str = f"r{rank}") -> None:
        """The keys [begin, begin + length) of the sequence; the label lies where it has room."""
        at, width = x0 + begin * cell, length * cell
        hatched = max(prefix - begin, 0) * cell if kind != "empty" else 0
        picture.rect(at, y, width, 24, kind)
        if hatched:
            picture.rect(at, y, hatched, 24, "hatch")
        if picture.width_of(label) + 8 < width - hatched:
            picture.text(at + width - 8, y + 16.5, label, anchor="end")
        else:
            picture.text(at + width + 8, y + 16.5, label)

    y += 68
    for name, plan, begin, says in (
        ("baked", baked, 0, ("counts the", "prefix")),
        ("bare", bare, prefix, ("new tokens only:", f"the reader adds {prefix}")),
    ):
        picture.text(LEFT, y + 16, name, "bold")
        for line, words in enumerate(says):
            picture.text(LEFT, y + 38 + 17 * line, words, "soft")
        for row, half in enumerate(("prev", "next")):
            length = getattr(plan, f"kv_len_{half}_list")[0]
            bar(y + 32 * row, begin, length, f"kv_len_{half} = {length}")
        y += 82
    y += 6
    picture.line((LEFT, y - 12), (680, y - 12))
    picture.text(LEFT, y + 10, "Two mistakes, each a ValueError here:", "bold")
    right, short = baked.kv_len_next_list[0], bare.kv_len_next_list[0]
    picture.text(LEFT, y + 40, "prefix forgotten")
    bar(y + 24, 0, short, f"next sees {short} keys instead of {right}", "empty")
    right, long = baked.kv_len_prev_list[0], baked.kv_len_prev_list[0] + prefix
    picture.text(LEFT, y + 72, "counted twice")
    bar(y + 56, 0, long, f"prev sees {long} keys instead of {right}", "empty")
    return picture.finish()


def prev_next() -> str:
    extends, lengths, ranks = [13, 9], [17, 9], 2
    plans = cpattn.build_cp_metadata_all_ranks(extends, lengths, cp_size=ranks)
    plan = plans[0]
    picture = Canvas(
        "The two attention calls of one rank",
        "Rank 0 of 2 has the first and the last block of two sequences. Its rows are all prev "
        "blocks, then all next blocks, and each half is one call of causal attention.",
    )
    cell, y = 24.0, 20.0
    picture.text(LEFT, y, "Two sequences over two ranks:", "bold")
    x, begin, owners = float(LEFT), 0, owners_of(plans)
    for i, (new, length) in enumerate(zip(extends, lengths, strict=True)):
        prefix = length - new
        if prefix:
            picture.cached(x, y + 12, prefix * cell, 30, "cached")
        left = x
        x += prefix * cell
        for a, b, rank in blocks_of(plans):
            if begin <= a < begin + new:
                words = f"{'AB'[i]} {'prev' if a - begin < new / 2 else 'next'}"
                mine = owners[a] == plan.cp_rank
                at = x + (a - begin) * cell
                kind, words = (f"r{rank}", words) if mine else ("plain", f"{rank}")
                picture.block(at, y + 12, (b - a) * cell, 30, words, kind, bold=mine)
        x += new * cell
        picture.brace(left, y + 46, x - left, f"sequence {'AB'[i]}")
        x += 26
        begin += new
    y += 100
    picture.text(LEFT, y, "Rows of rank 0, in this order in memory:", "bold")
    x = float(LEFT)
    for half in ("prev", "next"):
        rows = getattr(plan, f"actual_seq_q_{half}_list")
        left = x
        for i, count in enumerate(rows):
            picture.block(x, y + 12, count * 33, 30, f"{'AB'[i]} {half}", "r0", bold=True)
            x += count * 33
        total = getattr(plan, f"total_q_{half}_tokens")
        picture.brace(left, y + 46, x - left, f"total_q_{half}_tokens = {total}")
    top, tall = y + 126, 0.0
    size = 12.0
    x = float(LEFT)
    for call, half in enumerate(("prev", "next")):
        picture.text(x, top - 24, f"Call {call + 1}: {half}", "bold")
        at = x
        for i, (count, keys) in enumerate(
            zip(
                getattr(plan, f"actual_seq_q_{half}_list"),
                getattr(plan, f"kv_len_{half}_list"),
                strict=True,
            )
        ):
            seen = [keys - count + row + 1 for row in range(count)]
            picture.text(at, top - 5, f"{'AB'[i]}", "soft")
            picture.triangle(at, top, size, [0] * count, seen, lengths[i] - extends[i])
            under = top + count * size
            picture.text(at, under + 16, f"{count} × {keys}", "soft")
            at += max(keys * size, 60) + 20
            tall = max(tall, under)
        x += 320
    picture.paragraph(
        LEFT,
        tall + 28,
        670,
        "A box has the queries of a block as rows and kv_len keys as columns. The last query of a "
        "block sees all of them, each one before it one key less.",
    )
    return picture.finish()
