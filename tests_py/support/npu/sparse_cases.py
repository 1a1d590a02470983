# SPDX-License-Identifier: Apache-2.0
"""Batches of the indexer and of sparse flash attention, in all their layouts."""

from dataclasses import dataclass

import numpy as np
import torch

from support.cases import Named, expected_attention, one_after_another
from support.npu import fia_cases
from support.sparse.indexer_batch import integers, scores_of
from support.sparse.topk_cases import expected_topk
from support.tolerances import allowed_lse_error, assert_attended, assert_within

FORMS = [("BSND", "BSND"), ("TND", "TND"), ("BSND", "PA_BSND"), ("TND", "PA_BSND")]
Q_LENS, K_LENS = (5, 1, 0, 7), (20, 17, 9, 3)  # the last sequence has more queries than keys
BLOCK_SIZE, HEADS, DIM, TOPK = 16, 3, 32, 6


class Operator:
    """Batch of the indexer in the layouts of a call, with NaN in places that it must not read."""

    def __init__(self, form, q_lens=Q_LENS, k_lens=K_LENS, dtype=torch.float32, seed=0):
        rng = np.random.default_rng(seed)
        self.q_lens, self.k_lens, self.dtype = q_lens, k_lens, dtype
        self.layout_query, self.layout_key = form
        self.q = [integers(rng, (n, HEADS, DIM)) for n in q_lens]
        self.weights = [integers(rng, (n, HEADS), -3, 4) for n in q_lens]
        self.k = [integers(rng, (n, 1, DIM)) for n in k_lens]

    def lay_out(self, parts, layout):
        parts = [torch.from_numpy(part) for part in parts]
        if layout == "TND":
            return torch.cat([*parts, torch.full((2, *parts[0].shape[1:]), torch.nan)])
        return fia_cases.padded(parts, 2)

    def blocks(self):
        table = fia_cases.tables_of(self.k_lens, BLOCK_SIZE, np.random.default_rng(1))
        return fia_cases.blocks_of([torch.from_numpy(k) for k in self.k], table, BLOCK_SIZE), table

    def arguments(self, **changes):
        paged = self.layout_key == "PA_BSND"
        packed = self.layout_query == "TND"
        key, table = self.blocks() if paged else (self.lay_out(self.k, self.layout_key), None)
        arguments = {"query": self.lay_out(self.q, self.layout_query).to(self.dtype)}
        arguments |= {"key": key.to(self.dtype), "block_table": table, "sparse_count": TOPK}
        arguments["weights"] = self.lay_out(self.weights, self.layout_query)
        arguments |= {"layout_query": self.layout_query, "layout_key": self.layout_key}
        arguments["actual_seq_lengths_query"] = fia_cases.ends_of(self.q_lens, packed)
        arguments["actual_seq_lengths_key"] = fia_cases.ends_of(self.k_lens, packed and not paged)
        return arguments | changes

    def expected(self, mode):
        """Return indices and values, laid out, with -1 and -inf in spare rows."""
        tops, values = [], []
        for q, weights, k in zip(self.q, self.weights, self.k, strict=True):
            tops.append(np.full((len(q), 1, TOPK), -1, np.int32))
            values.append(np.full((len(q), 1, TOPK), -np.inf, np.float32))
            for i in range(len(q)):
                end = len(k) if mode == 0 else max(len(k) - len(q) + i + 1, 0)
                scores = scores_of(q[i], weights[i], k[:end, 0])
                (top,) = expected_topk([scores], [len(scores)], TOPK)
                tops[-1][i, 0] = top
                values[-1][i, 0, top >= 0] = scores[top[top >= 0]]
        indices = self.lay_out([top.astype(np.float32) for top in tops], self.layout_query)
        values = self.lay_out(values, self.layout_query)
        return indices.nan_to_num(-1).int(), values.nan_to_num(-torch.inf, neginf=-torch.inf)

    def check(self, result, mode=3, values=False):
        indices, scores = self.expected(mode)
        assert result[0].dtype == torch.int32
        assert torch.equal(result[0], indices)
        assert result[1].dtype == self.dtype
        if values:
            assert torch.equal(result[1], scores.to(self.dtype))
        else:
            assert result[1].shape == (0,)


@dataclass(frozen=True)
class Case(Named):
    layout_query: str = "TND"
    layout_kv: str = "PA_BSND"
    q_lens: tuple[int, ...] = (3, 0, 4)
    kv_lens: tuple[int, ...] = (40, 9, 21)
    head_dim: int = 32
    v_head_dim: int = 48
    rope_dim: int = 16
    block: int = 1
    mode: int = 3
    page_size: int = 8


def join(sequences, layout):
    """Return [T, ...] for TND, or [B, S, ...] padded with NaN (indices: with 0)."""
    if layout == "TND":
        return torch.cat(sequences)
    return fia_cases.padded(sequences, 1, torch.nan if sequences[0].is_floating_point() else 0)


class Batch:
    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case = case
        self.rng = np.random.default_rng(0)
        self.scale = 192**-0.5

        def random(count, heads, dim):
            return torch.from_numpy(self.rng.standard_normal((count, heads, dim))).to(dtype)

        width = case.head_dim + case.rope_dim
        self.queries = [random(n, HEADS, width) for n in case.q_lens]
        self.keys = [random(n, 1, width) for n in case.kv_lens]
        self.values = [random(n, 1, case.v_head_dim) for n in case.kv_lens]
        self.indices = [
            self.named_blocks(n, kv_len)
            for n, kv_len in zip(case.q_lens, case.kv_lens, strict=True)
        ]
        self.tables = fia_cases.tables_of(case.kv_lens, case.page_size, self.rng)

    def named_blocks(self, q_len, kv_len):
        """Return rows of distinct blocks, some beyond the sequence, with different lengths."""
        blocks = -(-kv_len // self.case.block) + 2
        rows = np.full((q_len, 1, blocks), -1)
        for row in rows:
            count = self.rng.integers(blocks + 1)
            row[0, :count] = self.rng.permutation(blocks)[:count]
            row[0, count + 1 :] = 0  # entries behind the -1 that ends the row
        return torch.from_numpy(rows).to(torch.int32)

    def arguments(self, **changes):
        case = self.case
        topk = max(x.shape[-1] for x in self.indices)
        indices = [
            torch.nn.functional.pad(x, (0, topk - x.shape[-1]), value=-1) for x in self.indices
        ]

        def place(sequences):
            if case.layout_kv == "PA_BSND":
                return fia_cases.blocks_of(sequences, self.tables, case.page_size)
            return join(sequences, case.layout_kv)

        nope, rope = slice(case.head_dim), slice(case.head_dim, None)
        query = join([q[..., nope] for q in self.queries], case.layout_query).contiguous()
        arguments = {"query": query, "key": place([k[..., nope] for k in self.keys])}
        arguments |= {"value": place(self.values), "scale_value": self.scale}
        arguments["sparse_indices"] = join(indices, case.layout_query)
        arguments |= {"layout_query": case.layout_query, "layout_kv": case.layout_kv}
        arguments |= {"sparse_block_size": case.block, "sparse_mode": case.mode}
        packed = case.layout_query == "TND", case.layout_kv == "TND"
        arguments["actual_seq_lengths_query"] = fia_cases.ends_of(case.q_lens, packed[0])
        arguments["actual_seq_lengths_kv"] = fia_cases.ends_of(case.kv_lens, packed[1])
        arguments["return_softmax_lse"] = True
        if case.rope_dim:
            arguments["query_rope"] = join([q[..., rope] for q in self.queries], case.layout_query)
            arguments["key_rope"] = place([k[..., rope] for k in self.keys])
            arguments["attention_mode"] = 2
        if case.layout_kv == "PA_BSND":
            arguments["block_table"] = self.tables
        return arguments | changes

    def seen_keys(self, sequence, i):
        """Return, by definition, positions of the named blocks, up to the query's own in mode 3."""
        case = self.case
        kv_len = case.kv_lens[sequence]
        end = kv_len - case.q_lens[sequence] + i + 1 if case.mode == 3 else kv_len
        seen = []
        for block in self.indices[sequence][i, 0].tolist():
            if block < 0:
                break
            seen += range(block * case.block, (block + 1) * case.block)
        return [position for position in seen if position < min(end, kv_len)]

    def expected(self):
        """Yield the place, the oracle's result and the largest score of each query."""
        row = 0
        for b, queries in enumerate(self.queries):
            for i in range(len(queries)):
                place = (0, row) if self.case.layout_query == "TND" else (b, i)
                row += 1
                seen = self.seen_keys(b, i)
                keys, values = self.keys[b][seen], self.values[b][seen]
                options = {"scale": self.scale, "causal": False}
                attended = expected_attention(
                    one_after_another(queries[i, None], keys, values, [1], [len(keys)], **options)
                )
                largest = np.full(HEADS, -np.inf)
                if seen:
                    scores = self.scale * queries[i].double() @ keys[:, 0].double().T
                    largest = scores.max(dim=1).values.numpy()
                yield place, attended, largest


def assert_query(out, softmax_max, softmax_sum, attended, largest):
    """Check one query: out [heads, dim], and maximum and sum of its softmax, [heads]."""
    dtype = str(out.dtype).removeprefix("torch.")
    softmax_max = softmax_max.reshape(1, -1)
    lse = softmax_max + softmax_sum.log().reshape(1, -1)
    assert_attended(out[None], lse, attended, dtype)
    allowed = allowed_lse_error(attended, dtype, score=largest)
    assert_within(softmax_max, largest[None], allowed, "the largest logit")
