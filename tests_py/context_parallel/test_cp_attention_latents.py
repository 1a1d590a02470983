# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA over ranks: rope is stored apart or not, and values are the start of keys."""

import math

import pytest
import torch

import cpattn
from support.cases import Case, assert_attention, make_inputs
from support.cp_batches import STRATEGIES

EXTENDS, PREFIXES = (13, 1, 40, 0, 5), (20, 3, 33, 9, 0)
KV_LENS = tuple(e + p for e, p in zip(EXTENDS, PREFIXES, strict=True))


class Latents:
    """Keys of `nope` and `rope` dimensions, whose first `value` ones are the values."""

    def __init__(self, nope=48, rope=16, value=32, dtype="float32", heads=4):
        self.nope, self.value, self.heads = nope, value, heads
        case = Case(
            q_lens=EXTENDS, kv_lens=KV_LENS, head_dim=nope + rope, num_heads=heads, num_kv_heads=1,
            dtype=dtype,
        )  # fmt: skip
        inputs = make_inputs(case)
        self.q = inputs["q"].contiguous()
        self.cache = inputs["k_cache"].contiguous()
        self.tables, self.page_size = inputs["block_tables"], case.page_size

    def whole(self, **options):
        """Attend in one process without context parallelism, with keys and ropes in one cache."""
        inputs = {"q": self.q, "k_cache": self.cache, "v_cache": self.cache[..., : self.value]}
        inputs |= {"q_lens": EXTENDS, "kv_lens": KV_LENS, "block_tables": self.tables}
        inputs |= {"scale": 0.1, **options}
        return cpattn.paged_attention(**inputs, batch_invariant=True, return_lse=True), inputs

    def apart(self, x):
        return x[..., : self.nope].contiguous(), x[..., self.nope :].contiguous()

    def all_ranks(self, cp_size, strategy, *, rope_apart, **options):
        ranks = cpattn.build_cp_metadata_all_ranks(
            EXTENDS, KV_LENS, cp_size=cp_size, strategy=strategy
        )
        parts = []
        for rank in ranks:
            q, cache, ropes = rank.shard(self.q), self.cache, {}
            if rope_apart:
                (q, q_rope), (cache, k_rope) = self.apart(q), self.apart(cache)
                ropes = {"q_rope": q_rope.flatten(1), "k_rope": k_rope}
            parts.append(self.run(q.flatten(1), cache, rank, **ropes, **options))
        out, lse = (ranks[0].unshard(list(part)) for part in zip(*parts, strict=True))
        return out.unflatten(1, (self.heads, -1)), lse

    def run(self, q, cache, rank, **options):
        arguments = {"block_tables": self.tables, "page_size": self.page_size, "scale": 0.1}
        arguments |= {"num_heads": self.heads, "num_kv_heads": 1, "v_head_dim": self.value}
        arguments |= {"return_lse": True}
        return cpattn.do_cp_attn_fia(q, cache, None, rank, **arguments | options)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rope_apart", [False, True])
@pytest.mark.parametrize("options", [{}, {"window": 9, "softcap": 2.0}, {"causal": False}])
def test_every_number_of_ranks_gives_the_bits_of_one_process(options, rope_apart, strategy):
    latents = Latents()
    expected, inputs = latents.whole(**options)
    assert_attention(*expected, inputs)
    for cp_size in (1, 2, 3, 8, 16):
        results = latents.all_ranks(cp_size, strategy, rope_apart=rope_apart, **options)
        assert all(map(torch.equal, results, expected)), cp_size


@pytest.mark.parametrize("rope_apart", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_deepseek_s_dimensions(isa, dtype, rope_apart):
    """Keys have 576 dimensions, of which 64 are rotary; values are the first 512 of one cache."""
    latents = Latents(512, 64, 512, dtype, heads=8)
    expected, _ = latents.whole()
    results = latents.all_ranks(3, "zigzag", rope_apart=rope_apart)
    assert all(map(torch.equal, results, expected))


def test_parts_have_any_number_of_dimensions(isa):
    latents = Latents(44, 20, 44)
    _, inputs = latents.whole()
    assert_attention(*latents.all_ranks(2, "zigzag", rope_apart=True), inputs)


def test_the_scale_of_both_parts_is_the_default():
    latents = Latents()
    rank = cpattn.build_cp_metadata(EXTENDS, KV_LENS, cp_rank=0, cp_size=1, strategy="contiguous")
    q, q_rope = latents.apart(latents.q)
    cache, k_rope = latents.apart(latents.cache)
    q = q.flatten(1)
    ropes = {"q_rope": q_rope.flatten(1), "k_rope": k_rope}
    default, given = (
        latents.run(q, cache, rank, scale=scale, **ropes)[0] for scale in (None, 1 / math.sqrt(64))
    )
    assert torch.equal(default, given)
    with pytest.raises(
        ValueError, match="scale must be given for head_dim > 256, got head_dim 272"
    ):
        latents.run(torch.zeros(59, 4 * 256), cache, rank, scale=None, **ropes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v_head_dim": 0}, r"v_head_dim must be in \[1, 576\], got 0"),
        ({"q_rope": torch.zeros(59, 66)}, r"q_rope must have .*of num_heads \(4\) columns"),
        ({"q_rope": torch.zeros(59, 0)}, r"the dimension of q_rope must be in \[1, 576\], got 0"),
        ({"q_rope": torch.zeros(58, 64)}, r"q_rope must have shape \[59, 4, 16\]"),
        ({"k_rope": torch.zeros(5)}, "k_rope must hold a multiple of num_pages"),
    ],
)
def test_value_errors(change, message):
    latents = Latents()
    rank = cpattn.build_cp_metadata(EXTENDS, KV_LENS, cp_rank=0, cp_size=1, strategy="contiguous")
    q, q_rope = latents.apart(latents.q)
    cache, k_rope = latents.apart(latents.cache)
    options = {"q_rope": q_rope.flatten(1), "k_rope": k_rope} | change
    with pytest.raises(ValueError, match=f"do_cp_attn_fia: {message}"):
        latents.run(q.flatten(1), cache, rank, **options)
