# SPDX-License-Identifier: Apache-2.0
"""Who owns which tokens, and what work follows from it."""

from __future__ import annotations

import numpy as np

import cpattn
from cpattn.cost_model import rank_work

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
        picture.triangle(x, y, cell, owners_of(plans[name]), keys)
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
