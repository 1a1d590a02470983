# SPDX-License-Identifier: Apache-2.0
"""Context-parallel prefill of a ragged batch, checked against one process.

    torchrun --standalone --nproc-per-node 4 examples/context_parallel_prefill.py

Every rank keeps its own pool of KV pages. A batch of three prompts, two of which have a cached
prefix, goes through two attention layers: each rank shards the hidden states, computes queries,
keys and values of its own tokens, exchanges keys and values once, and attends. Rank 0 then does
the same work alone, with pools of its own, and compares. Options: --strategy zigzag, interleave
or contiguous.
"""

from __future__ import annotations

import argparse
from datetime import timedelta

import torch
import torch.distributed as dist

import cpattn
from cpattn.distributed import ContextParallel

PAGE_SIZE, NUM_PAGES = 16, 64
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, LAYERS = 8, 2, 64, 2
WIDTH = NUM_HEADS * HEAD_DIM
EXTEND_LENS = [70, 200, 33]  # new tokens of each prompt
PREFIX_LENS = [0, 90, 300]  # tokens of each that are in the cache already
SEQ_LENS = [new + cached for new, cached in zip(EXTEND_LENS, PREFIX_LENS, strict=True)]


class Layer:
    """Projections of one attention layer and its pool, the same numbers on every rank."""

    def __init__(self, generator: torch.Generator) -> None:
        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return scale * torch.randn(*shape, generator=generator)

        kv_width = NUM_KV_HEADS * HEAD_DIM
        self.to_q, self.to_out = (random(WIDTH, WIDTH, scale=WIDTH**-0.5) for _ in range(2))
        self.to_k, self.to_v = (random(WIDTH, kv_width, scale=WIDTH**-0.5) for _ in range(2))
        # The slots of prefixes are filled already; those of new tokens are overwritten.
        slots = (NUM_PAGES * PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
        self.k_cache, self.v_cache = random(*slots), random(*slots)

    def project(self, x: torch.Tensor) -> list[torch.Tensor]:
        weights = (self.to_q, self.to_k, self.to_v)
        return [(x @ weight).view(len(x), -1, HEAD_DIM) for weight in weights]


def block_tables_of(generator: torch.Generator) -> torch.Tensor:
    """Pages of each prompt, in no order, as an allocator would hand them out."""
    needed = [-(-length // PAGE_SIZE) for length in SEQ_LENS]
    free = torch.randperm(NUM_PAGES, generator=generator)
    tables = torch.full((len(needed), max(needed)), -1)
    for row, pages in zip(tables, free[: sum(needed)].split(needed), strict=True):
        row[: len(pages)] = pages
    return tables


def inputs() -> tuple[list[Layer], torch.Tensor, torch.Tensor]:
    """Layers, hidden states and block tables: the same on every rank and in every call."""
    generator = torch.Generator().manual_seed(0)
    layers = [Layer(generator) for _ in range(LAYERS)]
    hidden = torch.randn(sum(EXTEND_LENS), WIDTH, generator=generator)
    return layers, hidden, block_tables_of(generator)


def parallel(cp: ContextParallel, layers: list[Layer], hidden: torch.Tensor, tables: torch.Tensor):
    """What an engine does: everything between shard and gather is on the rank's own tokens."""
    plan = cp.plan(EXTEND_LENS, SEQ_LENS, block_tables=tables)  # once for all layers
    x = cp.shard(plan, hidden)
    for layer in layers:
        q, k, v = layer.project(x)
        cp.write_kv(plan, k, v, layer.k_cache, layer.v_cache)  # the only exchange of a layer
        x = x + cp.attend(plan, q, layer.k_cache, layer.v_cache).flatten(1) @ layer.to_out
    return cp.gather(plan, x), len(plan.metadata.local_q_indices)


def alone(layers: list[Layer], hidden: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """The same layers in one process, with pools of its own."""
    lens = {"q_lens": EXTEND_LENS, "kv_lens": SEQ_LENS, "block_tables": tables}
    places = [
        (table[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE).item()
        for table, cached, length in zip(tables, PREFIX_LENS, SEQ_LENS, strict=True)
        for position in range(cached, length)
    ]
    x = hidden
    for layer in layers:
        q, layer.k_cache[places], layer.v_cache[places] = layer.project(x)
        out = cpattn.paged_attention(q, layer.k_cache, layer.v_cache, **lens, page_size=PAGE_SIZE)
        x = x + out.flatten(1) @ layer.to_out
    return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--strategy", default="zigzag")
    options = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    cp = ContextParallel(dist.group.WORLD, strategy=options.strategy, page_size=PAGE_SIZE)
    out, rows = parallel(cp, *inputs())
    all_rows = [None] * cp.cp_size
    dist.all_gather_object(all_rows, rows)
    if cp.cp_rank == 0:
        print(f"{options.strategy} over {cp.cp_size} ranks, {sum(EXTEND_LENS)} new tokens")
        print("tokens of each rank:", *all_rows)
        error = (out - alone(*inputs())).abs().max().item()
        print(f"largest difference from one process: {error:.1e}")
        if not error < 1e-4:
            raise SystemExit("the ranks do not compute what one process does")
        print("passed")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
