# SPDX-License-Identifier: Apache-2.0
"""Bugs of sparse attention in sglang, in files of the releases with these bugs."""

from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch

import cpattn
from cpattn_proof import Report, lint
from cpattn_proof.linting.adapters.selections import from_topk
from support.distributed.prefill_batches import Case, make_batch, slots_of
from support.proof.shipped import assert_proved, assert_refuted_as_written, shipped_entry
from support.sglang.sglang_releases import release

CP_SIZE = 2
TOPK, INDEX_HEADS, INDEX_DIM, ROPE_DIM = 8, 4, 64, 32
PREFIXED = Case("a cached prefix", (50,), (77,), page_size=16, num_kv_heads=1, head_dim=INDEX_DIM)


def index_vectors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make q [T, heads * dim] and weights [T, heads] of new tokens; k [n, dim] of all."""
    random = torch.Generator().manual_seed(23268)
    (new,), (total,) = PREFIXED.extend_lens, PREFIXED.seq_lens
    shapes = ((new, INDEX_HEADS * INDEX_DIM), (new, INDEX_HEADS), (total, INDEX_DIM))
    return tuple(torch.randn(shape, generator=random).bfloat16() for shape in shapes)


def all_scores() -> torch.Tensor:
    q, weights, k = (x.double() for x in index_vectors())
    heads = torch.relu(q.view(len(q), INDEX_HEADS, -1) @ k.T)
    return (weights[:, None] @ heads).squeeze(1)


def best_positions() -> torch.Tensor:
    """Return the TOPK best positions among the keys that each new token sees, ascending."""
    (prefix,) = PREFIXED.prefixes
    best = partial(torch.argsort, descending=True, stable=True)
    rows = enumerate(all_scores(), start=prefix + 1)
    return torch.stack([best(scores[:end])[:TOPK].sort().values for end, scores in rows])


def slots_of_request(num_tokens: int) -> torch.Tensor:
    return slots_of(make_batch(PREFIXED).block_tables, 0, num_tokens, PREFIXED.page_size)


class IndexKPool:
    """A pool of pages [pages, page_size, 1, dim] that have the prefix, and NaN elsewhere."""

    def __init__(self) -> None:
        num_pages = len(make_batch(PREFIXED).k_cache) // PREFIXED.page_size
        self.pages = torch.full((num_pages, PREFIXED.page_size, 1, INDEX_DIM), torch.nan).bfloat16()
        (prefix,) = PREFIXED.prefixes
        self.set_index_k_buffer(0, slots_of_request(prefix), index_vectors()[2][:prefix])

    def set_index_k_buffer(self, layer_id: int, slots: torch.Tensor, k: torch.Tensor) -> None:
        self.pages.view(-1, INDEX_DIM)[slots] = k

    def get_index_k_buffer(self, layer_id: int) -> torch.Tensor:
        return self.pages


def positions_by_release(sglang: SimpleNamespace, build_metadata) -> torch.Tensor:
    q, weights, k = index_vectors()
    (new,), (prefix,), (total,) = PREFIXED.extend_lens, PREFIXED.prefixes, PREFIXED.seq_lens
    parts = []
    for rank in range(CP_SIZE):
        ours = cpattn.build_cp_metadata([new], [total], cp_rank=rank, cp_size=CP_SIZE)
        metadata = build_metadata(new, rank, CP_SIZE, [total])
        for name in ("kv_len_prev", "kv_len_next", "actual_seq_q_prev", "actual_seq_q_next"):
            lengths = getattr(metadata, f"{name}_tensor")  # a scalar in 0.5.10
            setattr(metadata, f"{name}_tensor", lengths.view(1))
        planned = SimpleNamespace(
            seq_lens_cpu_int=torch.tensor([total]),
            block_tables=make_batch(PREFIXED).block_tables.int(),
        )
        batch = SimpleNamespace(
            **dict.fromkeys(("attn_cp_metadata", "nsa_cp_metadata"), metadata),
            attn_backend=SimpleNamespace(forward_metadata=planned),
            extend_prefix_lens=torch.tensor([prefix]),
            extend_prefix_lens_cpu=[prefix],
            forward_mode=EXTEND,
            out_cache_loc=slots_of_request(total)[prefix:],
            token_to_kv_pool=IndexKPool(),
        )
        indexer = make_indexer(sglang.indexer.Indexer)
        sglang.indexer.cp_all_gather_rerange_output = lambda *_: k[prefix:]
        hidden = torch.cat([ours.shard(k[prefix:]), ours.shard(weights)], 1)
        positions = ours.shard(torch.arange(prefix, total))
        chosen = indexer.forward_npu(hidden, ours.shard(q), positions, batch, layer_id=0)
        parts.append(torch.cat(chosen)[:, 0])
    return ours.unshard(parts).sort().values


NO = dict.fromkeys(
    ("is_decode", "is_draft_extend", "is_draft_extend_v2", "is_target_verify"), lambda: False
)
YES = dict.fromkeys(("is_extend", "is_context_parallel_extend"), lambda: True)
EXTEND = SimpleNamespace(**YES, **NO)


def make_indexer(upstream: type) -> SimpleNamespace:
    """Make the attributes that `forward_npu` reads: hidden states are k next to weights, q_lora is
    q, and all rotations are by the angle 0."""
    angles = torch.ones(PREFIXED.seq_lens[0], ROPE_DIM)
    angles[:, ROPE_DIM // 2 :] = 0
    options = {"alt_stream": None, "cp_size": CP_SIZE, "head_dim": INDEX_DIM}
    options |= {"hidden_size": INDEX_DIM + INDEX_HEADS, "index_topk": TOPK, "k_norm": lambda k: k}
    options |= {"n_heads": INDEX_HEADS, "nsa_enable_prefill_cp": True, "rope_head_dim": ROPE_DIM}
    options |= {"rotary_emb": SimpleNamespace(cos_sin_cache=angles, is_neox_style=True)}
    options |= {"weights_proj": lambda x: (x[:, INDEX_DIM:],), "wk": lambda x: (x[:, :INDEX_DIM],)}
    options |= {"wq_b": lambda q: (q,)}
    indexer = SimpleNamespace(**options)
    indexer.forward_npu = partial(upstream.forward_npu, indexer)
    indexer.do_npu_cp_balance_indexer = partial(upstream.do_npu_cp_balance_indexer, indexer)
    return indexer


def test_23268_queries_saw_the_start_of_the_prefix_and_no_more(monkeypatch):
    """Queries of 0.5.10 see no more; later releases add the prefix, for batches of one."""
    monkeypatch.setattr(torch, "npu", SimpleNamespace(current_stream=lambda: None), raising=False)
    expected = best_positions()
    with release(
        "0.5.10", indexer="layers.attention.nsa.nsa_indexer", cp="layers.attention.nsa.utils"
    ) as sglang:
        forgetful = positions_by_release(sglang, sglang.cp.prepare_input_dp_with_cp_dsa)
    (new,) = PREFIXED.extend_lens
    assert forgetful.max() < new
    assert not (forgetful == expected).all(1).any()
    entry = shipped_entry("sgl-project/sglang#23268", "lint")
    assert_refuted_as_written(linted(forgetful), entry)

    with (
        release(
            "0.5.12", indexer="layers.attention.nsa.nsa_indexer", cp="layers.utils.cp_utils"
        ) as sglang,
        mock.patch.dict("sys.modules", {"sglang.srt.layers.attention.nsa.utils": NSA_ENABLED}),
    ):
        fixed = positions_by_release(sglang, sglang.cp.prepare_context_parallel_metadata)
    assert torch.equal(fixed, expected.int())
    assert_proved(linted(fixed), entry)


def linted(positions: torch.Tensor) -> Report:
    (new,), (prefix,) = PREFIXED.extend_lens, PREFIXED.prefixes
    rows = [([0] * new, range(prefix, prefix + new))]
    return lint(from_topk([new], [prefix], rows, [positions], topk=TOPK, scores=[all_scores()]))


NSA_ENABLED = SimpleNamespace(
    is_nsa_enable_prefill_cp=lambda: True, is_nsa_prefill_cp_round_robin_split=lambda: False
)
