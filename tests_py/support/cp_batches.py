# SPDX-License-Identifier: Apache-2.0
"""Context-parallel batch with its cache, and the share that a rank has to compute."""

import torch

import cpattn
from support.cases import Case, make_inputs

STRATEGIES = ("zigzag", "interleave", "contiguous")


def on_ranks(q, caches, extend_lens, kv_lens, cp_size, strategy, q_rope=None, **options):
    """Return out [tokens, heads, dim] and lse of the whole batch, from the shares of all ranks."""
    ranks = cpattn.build_cp_metadata_all_ranks(
        extend_lens, kv_lens, cp_size=cp_size, strategy=strategy
    )
    rows, options = q.flatten(1).contiguous(), options | {"num_heads": q.shape[1]}
    parts = []
    for rank in ranks:
        ropes = {} if q_rope is None else {"q_rope": rank.shard(q_rope)}
        own = rank.shard(rows), *caches, rank
        parts.append(cpattn.do_cp_attn_fia(*own, return_lse=True, **ropes, **options))
    out, lse = (ranks[0].unshard(list(part)) for part in zip(*parts, strict=True))
    return out.unflatten(1, (q.shape[1], -1)), lse


class Batch:
    """New tokens behind prefixes, their caches, and the ranks' shares."""

    def __init__(self, extend_lens, prefix_lens, cp_size, strategy, seed=0, weights=None, **sizes):
        kv_lens = tuple(e + p for e, p in zip(extend_lens, prefix_lens, strict=True))
        self.case = Case(q_lens=tuple(extend_lens), kv_lens=kv_lens, **sizes)
        self.inputs = make_inputs(self.case, seed)
        self.metadata = cpattn.build_cp_metadata_all_ranks(
            extend_lens, kv_lens, cp_size=cp_size, strategy=strategy, weights=weights
        )

    def flat_caches(self):
        """Return the caches as engines hold them: [pages * page_size, num_kv_heads, dim]."""
        return [self.inputs[name].contiguous().flatten(0, 1) for name in ("k_cache", "v_cache")]

    def run(self, metadata, q, **options):
        case = self.case
        given = dict(zip(("k_cache", "v_cache"), self.flat_caches(), strict=True)) | {"q": q}
        given |= {"block_tables": self.inputs["block_tables"], "scale": case.head_dim**-0.5}
        given |= {"num_heads": case.num_heads, "num_kv_heads": case.num_kv_heads}
        given |= {"page_size": case.page_size, **case.options, **options}
        return cpattn.do_cp_attn_fia(metadata=metadata, **given)

    def whole(self):
        """Return out and lse of one process without context parallelism."""
        return cpattn.paged_attention(
            **self.inputs | {"scale": self.case.head_dim**-0.5},
            batch_invariant=True,
            return_lse=True,
        )

    def all_ranks(self, pad_rows=0):
        """Return out and lse of the whole batch from the shares, each with pad rows of NaN."""
        outs, lses = [], []
        for metadata in self.metadata:
            q = metadata.shard(self.inputs["q"].flatten(1).contiguous())
            rows = len(metadata.local_q_indices)
            physical = torch.full((rows + pad_rows, q.shape[1]), torch.nan, dtype=q.dtype)
            physical[:rows] = q[:rows]
            out, lse = self.run(metadata, physical, return_lse=True)
            assert torch.all(out[rows:] == 0)
            assert torch.all(torch.isneginf(lse[rows:]))
            outs.append(out)
            lses.append(lse)
        out, lse = (self.metadata[0].unshard(parts) for parts in (outs, lses))
        return out.unflatten(1, (self.case.num_heads, -1)), lse
