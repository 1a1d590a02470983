# SPDX-License-Identifier: Apache-2.0
"""Every rank's rows agree with one process, with the two steps, and with the oracle."""

import pytest
import torch

import cpattn
from cpattn.sparse import cp_sparse_mla, flash_mla_sparse_fwd
from support.sparse.indexer_batch import IndexerBatch

STRATEGIES = ("zigzag", "interleave", "contiguous")
EXTENDS, PREFIXES = (13, 1, 40, 0, 5), (20, 3, 33, 9, 0)
HEADS, DIM, D_V = 4, 48, 32
SCALE = 0.2


class Batch(IndexerBatch):
    """A batch with latents in the pages of the index keys."""

    def __init__(self, *args, **options):
        super().__init__(*args, dtype="float32", **options)
        draw = torch.Generator().manual_seed(7)
        self.kv = torch.randn(self.num_pages * self.page_size, 1, DIM, generator=draw)
        self.latent_q = torch.randn(len(self.q), HEADS, DIM, generator=draw)
        self.sinks = torch.randn(HEADS, generator=draw)

    def attend(self, metadata, pad_rows=0, **options):
        index_q, weights = self.shard(metadata, pad_rows)
        q = metadata.shard(self.latent_q)
        q = torch.cat([q, torch.full((pad_rows, *q.shape[1:]), torch.nan, dtype=q.dtype)])
        arguments = {
            "q": q,
            "kv": self.kv,
            "index_q": index_q,
            "index_k_cache": self.cache,
            "weights": weights,
            "metadata": metadata,
            "block_tables": self.block_tables,
            "page_size": self.page_size,
            "topk": self.topk,
            "sm_scale": SCALE,
            "d_v": D_V,
            "attn_sink": self.sinks,
            "index_k_scale": self.k_scale,
        }
        return cp_sparse_mla(**arguments | options)

    def all_ranks(self, pad_rows=0):
        parts = [self.attend(metadata, pad_rows, return_lse=True) for metadata in self.metadata]
        for metadata, (out, lse) in zip(self.metadata, parts, strict=True):
            rows = len(metadata.local_q_indices)
            assert torch.all(out[rows:] == 0)
            assert torch.all(torch.isneginf(lse[rows:]))
        return [self.metadata[0].unshard(list(part)) for part in zip(*parts, strict=True)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("topk", [1, 8, 200])  # the last one selects all keys
def test_every_number_of_ranks_gives_the_bits_of_one_process(topk, strategy):
    for cp_size in (1, 3, 16):
        batch = Batch(EXTENDS, PREFIXES, cp_size, strategy, topk=topk)
        chosen = batch.slots()[:, None]
        expected = flash_mla_sparse_fwd(batch.latent_q, batch.kv, chosen, SCALE, D_V, batch.sinks)
        out, lse = batch.all_ranks(pad_rows=cp_size % 3)
        assert torch.equal(out, expected[0]), cp_size
        assert torch.equal(lse, expected[2]), cp_size


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_of_656_bytes(strategy):
    draw = torch.Generator().manual_seed(2)
    batch = Batch(EXTENDS, PREFIXES, 4, strategy)
    slots = len(batch.kv)
    nope, rope = (torch.randn(slots, n, generator=draw).bfloat16() for n in (512, 64))
    batch.kv = cpattn.sparse.quantize_kv_rows(nope, rope)
    batch.latent_q = torch.randn(len(batch.q), HEADS, 576, generator=draw).bfloat16()
    parts = [batch.attend(metadata, d_v=512) for metadata in batch.metadata]
    rows = cpattn.sparse.dequantize_kv_rows(batch.kv)
    chosen = batch.slots()[:, None]
    expected = flash_mla_sparse_fwd(batch.latent_q, rows, chosen, SCALE, 512, batch.sinks)
    assert torch.equal(batch.metadata[0].unshard(parts), expected[0])


def test_bare_metadata_with_its_prefixes():
    bare = Batch(EXTENDS, PREFIXES, 2, "zigzag", "bare")
    baked = Batch(EXTENDS, PREFIXES, 2, "zigzag")
    for one, other in zip(bare.metadata, baked.metadata, strict=True):
        assert torch.equal(bare.attend(one, prefix_lens=PREFIXES), baked.attend(other))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(3, HEADS, DIM)}, r"q must have the 31 rows of index_q"),
        ({"topk": 0}, r"topk must be 1 to 1048576 for 31 rows, got 0"),
        ({"topk": 1 << 33}, r"topk must be 1 to 1048576 for 31 rows, got 8589934592"),
        ({"kv": torch.zeros(16, 1, DIM)}, "kv must have .*slots of block_tables, got 16 for slot"),
        ({"kv": torch.zeros(480, 1, 16)}, "kv must have shape"),
        ({"d_v": 0}, "d_v must be"),
        ({"page_size": 5}, "index_k_cache must"),
        ({"weights": torch.zeros(31, 7)}, "weights must"),
        ({"block_tables": [[0]]}, "block_tables must have one row per sequence"),
        ({"prefix_lens": PREFIXES}, "prefix_lens must not be given"),
    ],
)
def test_value_errors(change, message):
    batch = Batch(EXTENDS, PREFIXES, 2)
    metadata = batch.metadata[0]
    out = torch.full((len(metadata.local_q_indices), HEADS, D_V), torch.nan)
    with pytest.raises(ValueError, match=f"cp_sparse_mla: {message}"):
        batch.attend(metadata, out=out, **change)
    assert torch.all(torch.isnan(out))
