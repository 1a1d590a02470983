# SPDX-License-Identifier: Apache-2.0
"""Sparse attention (DSA) of DeepSeek-V3.2 over an FP8 cache, alone and split over two ranks.

    python examples/sparse_attention.py

Needs torch. Two sequences, one of them behind a cached prefix: the indexer (64 heads) scores all
keys that a token sees and picks 64 of them; attention (16 heads) gathers their latent rows, 656
bytes each, from the FP8 cache. This is compared with the float64 oracle. Then each of two
context-parallel ranks does it for its own tokens, and the bits are compared.
"""

from __future__ import annotations

import torch

import cpattn
from cpattn import sparse

PAGE_SIZE, NUM_PAGES, TOPK = 64, 16, 64
INDEX_HEADS, HEADS, LATENT, ROPE = 64, 16, 512, 64
EXTEND_LENS, SEQ_LENS = [100, 40], [100, 340]  # the second has 300 tokens in the cache
SCALE = (128 + ROPE) ** -0.5  # of the width before absorption, as in the model
TABLES = torch.tensor([[3, 9, -1, -1, -1, -1], [0, 5, 14, 2, 7, 1]])

torch.manual_seed(0)
num_tokens, num_slots = sum(EXTEND_LENS), NUM_PAGES * PAGE_SIZE
index_q = torch.randn(num_tokens, INDEX_HEADS, 128).bfloat16()
weights = torch.randn(num_tokens, INDEX_HEADS)
q = torch.randn(num_tokens, HEADS, LATENT + ROPE).bfloat16()

# The caches, with the new tokens written already.
index_keys = torch.randn(num_slots, 128).bfloat16()
index_pages = index_keys.view(NUM_PAGES, PAGE_SIZE, 128)
rows = sparse.quantize_kv_rows(torch.randn(num_slots, 1, LATENT), torch.randn(num_slots, 1, ROPE))


def attend(rank: cpattn.ContextParallelMetadata) -> torch.Tensor:
    """What a rank does for its own tokens, in the order in which it has them."""
    positions = sparse.cp_indexer_topk(
        rank.shard(index_q),
        index_pages,
        rank.shard(weights),
        rank,
        block_tables=TABLES,
        page_size=PAGE_SIZE,
        topk=TOPK,
    )
    return sparse.flash_mla_sparse_fwd(rank.shard(q), rows, slots_of(rank, positions), SCALE)[0]


def slots_of(rank: cpattn.ContextParallelMetadata, positions: torch.Tensor) -> torch.Tensor:
    """Rows of the cache for positions within sequences; -1 stays -1."""
    sequence = torch.repeat_interleave(torch.arange(len(EXTEND_LENS)), torch.tensor(EXTEND_LENS))
    tables = TABLES[rank.shard(sequence)]
    pages = tables.gather(1, (positions.clamp(min=0) // PAGE_SIZE).long())
    slots = pages * PAGE_SIZE + positions % PAGE_SIZE
    return torch.where(positions < 0, -1, slots).int()


def oracle() -> torch.Tensor:
    """Scores of all keys in float64, the best of them by a sort, attention over expanded rows."""
    latents = sparse.dequantize_kv_rows(rows)
    first, chosen = 0, []
    for table, new, length in zip(TABLES, EXTEND_LENS, SEQ_LENS, strict=True):
        slots = (table[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()[:length]
        tokens = slice(first, first + new)
        sees = range(length - new + 1, length + 1)
        scores = cpattn.reference.indexer_logits(
            index_q[tokens], index_keys[slots], weights[tokens], [0] * new, list(sees)
        )
        best = torch.from_numpy(scores).sort(dim=1, descending=True, stable=True).indices[:, :TOPK]
        chosen.append(torch.where(best < torch.tensor(sees)[:, None], slots[best], -1))
        first += new
    return torch.from_numpy(
        cpattn.reference.flash_mla_sparse_fwd(q, latents, torch.cat(chosen), SCALE)[0]
    )


if __name__ == "__main__":
    (alone,) = cpattn.build_cp_metadata_all_ranks(EXTEND_LENS, SEQ_LENS, cp_size=1)
    whole = alone.unshard([attend(alone)])
    error = (whole.double() - oracle()).abs().max().item()
    print(f"{num_tokens} new tokens, {TOPK} keys for each of them at most")
    print(f"cache of a token: {rows.shape[-1]} bytes, and {2 * 128} for the indexer")
    print(f"largest difference from the float64 oracle: {error:.1e}")
    assert error < 2e-2, error  # roundings of bfloat16

    ranks = cpattn.build_cp_metadata_all_ranks(EXTEND_LENS, SEQ_LENS, cp_size=2)
    parts = [attend(rank) for rank in ranks]
    assert torch.equal(ranks[0].unshard(parts), whole)
    print(f"two ranks, {[len(part) for part in parts]} tokens: the same bits")
