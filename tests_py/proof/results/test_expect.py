# SPDX-License-Identifier: Apache-2.0
"""Results of rings, right or wrong in known ways, are joined and compared with float64."""

import math

import pytest
import torch
import torch.distributed as dist

from cpattn_proof import NotUsable, expect, simulate
from support.distributed.distributed_worker import run_world

LENGTH, HEADS, KV_HEADS, DIM = 32, 4, 2, 16


def prompt(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(LENGTH, heads, DIM, generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def zigzag(rank, size, bug=""):
    block = LENGTH // (2 * size)
    mirror = 2 * size - (2 if bug == "owner" else 1) - rank
    return torch.cat([torch.arange(b * block, (b + 1) * block) for b in (rank, mirror)])


def attend(q, k, v, sees, bug=""):
    order = "repeat" if bug == "heads" else "repeat_interleave"
    groups = HEADS // KV_HEADS
    k, v = (
        x.repeat(1, groups, 1) if order == "repeat" else x.repeat_interleave(groups, 1)
        for x in (k, v)
    )
    scores = torch.einsum("qhd,khd->qhk", q, k) * (1.0 if bug == "scale" else DIM**-0.5)
    scores = scores.masked_fill(~sees[:, None], -math.inf)
    weights = scores.softmax(-1)
    if bug != "nan":
        weights = weights.nan_to_num()
    return torch.einsum("qhk,khd->qhd", weights, v), scores.logsumexp(-1)


def merge(mine, other, bug):
    power, log = (torch.exp2, torch.log2) if bug == "base" else (torch.exp, torch.log)
    top = torch.maximum(mine[1], other[1]).clamp(min=-1e30)
    weights = [power(lse - top) for _, lse in (mine, other)]
    total = sum(weights)
    shares = weights[::-1] if bug == "swapped" else weights
    out = sum(
        share[..., None] * part for share, (part, _) in zip(shares, (mine, other), strict=True)
    )
    return out / total.clamp(min=1e-30)[..., None], top + log(total)


def pass_on(tensors):
    rank, size = dist.get_rank(), dist.get_world_size()
    received = [torch.empty_like(tensor) for tensor in tensors]
    messages = []
    for tensor, into in zip(tensors, received, strict=True):
        messages.append(dist.P2POp(dist.isend, tensor, (rank + 1) % size))
        messages.append(dist.P2POp(dist.irecv, into, (rank - 1) % size))
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return received


def ring(bug="", **options):
    q, k, v = prompt()
    at = zigzag(dist.get_rank(), dist.get_world_size(), bug)
    q, k, v = q[at], k[at], v[at]
    keys, result = [k, v, at], None
    for step in range(dist.get_world_size()):
        part = attend(q, *keys[:2], keys[2] <= at[:, None] + (bug == "mask"), bug)
        left_out = step == 1 and (bug == "step" or (bug == "rank 1" and dist.get_rank() == 1))
        if result is None:
            result = part
        elif not left_out:
            result = merge(result, part, bug)
        if bug == "twice" and step == 1:
            result = merge(result, part, bug)
        keys = pass_on(keys)
    lse = result[1] / (math.log(2) if bug == "lse" else 1)
    return expect(result[0], q, k, v, at, lse=lse if bug in ("", "lse") else None, **options)


def test_a_right_ring_is_proved():
    report = simulate(ring, ranks=4)
    assert report.proved, report.text()
    assert report.checked == ("SEQ", "OWN", "COV", "LSE")
    assert "results" not in report.not_checked


@pytest.mark.parametrize(
    ("bug", "invariant", "kind", "ranks"),
    [
        ("base", "LSE", "merge-wrong-base", (0, 1, 2, 3)),
        ("swapped", "LSE", "merge-swapped", (0, 1, 2, 3)),
        ("nan", "LSE", "merge-nan", (0, 1, 2)),
        ("mask", "COV", "mask-off-by-one", (0, 1, 2, 3)),
        ("scale", "COV", "scale-ignored", (0, 1, 2, 3)),
        ("heads", "OWN", "gqa-head-order", (0, 1, 2, 3)),
        ("step", "COV", "part-missing", (0, 1, 2, 3)),
        ("rank 1", "COV", "part-missing", (1,)),
        ("twice", "COV", "part-twice", (0, 1, 2, 3)),
        ("lse", "LSE", "lse-base-2", (0, 1, 2, 3)),
        ("owner", "OWN", "own-token", (3,)),
    ],
)
def test_a_wrong_ring_is_refuted_by_name(bug, invariant, kind, ranks):
    report = simulate(ring, ranks=4, args=(bug,), seeds=[0])
    (found,) = report.findings
    assert (found.invariant, found.kind, found.ranks) == (invariant, kind, ranks), found.text()
    assert invariant in report.checked
    assert "sequence 0" in found.where
    if bug == "owner":
        assert report.checked == ("SEQ", "OWN")
        assert found.what.startswith("keys of position 12 of sequence 0 are on rank 3, twice")
    else:
        assert f"rank {ranks[-1]}  row " in found.picture


def test_what_is_wrong_with_the_calls_comes_first():
    def program():
        ring("base")
        if dist.get_rank() == 0:
            dist.barrier()

    report = simulate(program, ranks=2, seeds=[0])
    assert {found.invariant for found in report.findings} == {"SEQ"}
    assert report.checked == ("SEQ",)


def test_every_rank_of_a_decode_step_is_looked_at():
    def program(wrong):
        q, k, v = prompt()
        own = torch.arange(dist.get_rank(), LENGTH, 2)
        part = attend(q[-1:], k[own], v[own], torch.ones(1, len(own), dtype=torch.bool))
        parts = (
            [torch.empty_like(part[0]) for _ in range(2)],
            [torch.empty_like(part[1]) for _ in range(2)],
        )
        for gathered, mine in zip(parts, part, strict=True):
            dist.all_gather(gathered, mine)
        out, _ = merge(*zip(*parts, strict=True), "")
        out = out + (dist.get_rank() == wrong)
        expect(out, q[-1:], k[own], v[own], [LENGTH - 1], key_positions=own)

    assert simulate(program, ranks=2, args=(None,), seeds=[0]).proved
    (found,) = simulate(program, ranks=2, args=(1,), seeds=[0]).findings
    assert found.ranks == (1,)


def whole(q, k, v, sees, **more):
    return attend(q, k, v, sees, **more)[0]


CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def test_options_are_those_of_attention():
    q, k, v = prompt()
    window = CAUSAL & ~CAUSAL.tril(-6)
    at = range(LENGTH)
    assert expect(whole(q, k, v, window), q, k, v, at, window=5).proved
    with pytest.raises(AssertionError, match=r"^COV window-off-by-one: the program has windows"):
        expect(whole(q, k, v, window), q, k, v, at, window=6)
    assert expect(whole(q, k, v, torch.ones_like(CAUSAL)), q, k, v, at, causal=False).proved
    assert expect(whole(q, k, v, CAUSAL, bug="scale"), q, k, v, at, scale=1.0).proved
    rows = q[-3:], CAUSAL[-3:]
    assert expect(whole(rows[0], k, v, rows[1]), rows[0], k, v, at[-3:], key_positions=at).proved
    pads = [
        torch.cat([x, torch.full_like(x[:2], math.nan)]) for x in (whole(q, k, v, CAUSAL), q, k, v)
    ]
    assert expect(*pads, [*at, -1, -1]).proved


def test_sequences_and_batches():
    first, second = prompt(0), prompt(1)
    outs = [whole(*x, CAUSAL) for x in (first, second)]
    both = [torch.cat(pair) for pair in zip(first, second, strict=True)]
    positions = [*range(LENGTH)] * 2
    assert expect(torch.cat(outs), *both, positions, sequences=[0] * LENGTH + [1] * LENGTH).proved
    batch = [torch.stack(pair) for pair in zip(first, second, strict=True)]
    assert expect(torch.stack(outs), *batch, range(LENGTH)).proved
    others = [
        whole(q, k, v, CAUSAL) for q, k, v in ((first[0], *second[1:]), (second[0], *first[1:]))
    ]
    with pytest.raises(AssertionError, match=r"^OWN batch-order: the program gives sequences"):
        expect(torch.stack(others), *batch, range(LENGTH))


def test_16_bits_are_allowed_their_roundings():
    q, k, v = (x.bfloat16() for x in prompt())
    out = whole(q.float(), k.float(), v.float(), CAUSAL)
    assert expect(out.bfloat16(), q, k, v, range(LENGTH)).proved


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"positions": None}, "positions must be given"),
        ({"positions": range(3)}, "positions must be 32 ints"),
        ({"positions": [0.5] * LENGTH}, "positions must be 32 ints"),
        ({"out": "x"}, "out must be floats"),
        ({"out": torch.zeros(3, HEADS, DIM)}, "out must have the rows and heads of q"),
        ({"k": torch.zeros(LENGTH, 3, DIM)}, "v must have the rows and heads of k"),
        ({"q": torch.zeros(LENGTH, HEADS, 8)}, "k must have the head_dim of q"),
        ({"sequences": [0]}, "sequences must be 32 ints"),
        ({"lse": torch.zeros(3)}, r"lse must be \[32, 4\]"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change, said):
    q, k, v = prompt()
    arguments = {"out": whole(q, k, v, CAUSAL), "q": q, "k": k, "v": v, "positions": range(LENGTH)}
    with pytest.raises(NotUsable, match=f"^expect: {said}"):
        expect(**(arguments | change))


def test_ranks_have_to_agree_and_call_it_equally_often():
    def other_scale():
        ring(scale=0.25 + dist.get_rank())

    with pytest.raises(NotUsable, match="expect: options must be the same on all ranks"):
        simulate(other_scale, ranks=2, seeds=[0])

    def once_more():
        ring()
        if dist.get_rank():
            q, k, v = prompt()
            expect(q, q, k, v, range(LENGTH))

    with pytest.raises(NotUsable, match=r"must call it equally often, got \[1, 2\] calls of"):
        simulate(once_more, ranks=2, seeds=[0])


def test_a_token_on_no_rank_is_named():
    def program():
        q, k, v = prompt()
        at = torch.arange(LENGTH)[dist.get_rank() :: 2][: 10 if dist.get_rank() else None]
        dist.barrier()
        expect(q[at], q[at], k[at], v[at], at)

    (found,) = simulate(program, ranks=2, seeds=[0]).findings
    assert found.what == "keys of position 21 of sequence 0 are on no rank, up to position 21"


def verdict_of(rank, bug):
    return ring(bug).verdict


@pytest.mark.slow
def test_processes_gather_over_their_group(tmp_path):
    assert run_world(2, tmp_path, verdict_of, "") == ["proved", "proved"]
    (tmp_path / "base").mkdir()
    with pytest.raises(AssertionError, match="LSE merge-wrong-base: the program merges"):
        run_world(2, tmp_path / "base", verdict_of, "base")
