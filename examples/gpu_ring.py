# SPDX-License-Identifier: Apache-2.0
"""A ring of ranks on one GPU, driven by a plan: keys arrive on one stream, products run on another.

    python examples/gpu_ring.py --ranks 4 --tokens 32768

The plan says which tokens of a prompt each rank has. Every rank attends to its own keys, and in
each step to those of the next rank, which are copied into a second buffer meanwhile. Partial
results are merged by their log-sum-exps. Rows of all ranks are held against attention in float64.
The kernel is torch's flash attention; everything else would be the same over NCCL.
"""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np
import torch
from torch.utils.benchmark import Timer

from cpattn import build_cp_metadata_all_ranks

HEADS, HEAD_DIM = 8, 128
BOUND = 2**-6  # of bfloat16 outputs of about 1: weights, partial results and sums are rounded


def runs_of(indices: np.ndarray) -> list[tuple[int, int]]:
    """Return where consecutive tokens begin and end: two chunks of a rank under zigzag."""
    ends = np.flatnonzero(np.diff(indices) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(indices, ends)]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool):
    """Return the output [heads, rows, dim] and the log-sum-exp [heads, rows], in float32."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *_ = flash(q[None], k[None], v[None], 0.0, causal, False)
    return out[0].float(), lse[0]


def ring(rank: int, runs, q, k, v, copies: torch.cuda.Stream) -> torch.Tensor:
    """Return the output of a rank's rows, chunk after chunk."""
    compute, size = torch.cuda.current_stream(), len(runs)
    shares = [torch.cat([x[:, a:b] for x in (k, v) for a, b in own], 1) for own in runs]
    coming = [shares[(rank + step) % size] for step in range(size)]
    spare = [torch.empty_like(max(shares, key=torch.numel)) for _ in range(2)]
    held = [spare[step % 2][:, : share.shape[1]] for step, share in enumerate(coming)]
    held[0] = coming[0]
    arrived, read = ([torch.cuda.Event() for _ in range(size)] for _ in range(2))
    results: list = [None] * len(runs[rank])
    copies.wait_stream(compute)
    for step in range(size):
        if step:
            compute.wait_event(arrived[step])
        if step + 1 < size:
            with torch.cuda.stream(copies):
                if step > 1:
                    copies.wait_event(read[step - 1])  # what the buffer held before
                held[step + 1].copy_(coming[step + 1], non_blocking=True)
                arrived[step + 1].record()
        keys, values = held[step].chunk(2, dim=1)
        first = 0
        for begin, end in runs[(rank + step) % size]:
            chunk, first = slice(first, first + end - begin), first + end - begin
            for i, (start, stop) in enumerate(runs[rank]):
                if begin < stop:  # else all of these keys are behind all of these queries
                    rows = q[:, start:stop]
                    part = attend(rows, keys[:, chunk], values[:, chunk], causal=begin == start)
                    results[i] = part if results[i] is None else merged(results[i], part)
        read[step].record()
    return torch.cat([out for out, _ in results], 1)


def merged(one, other):
    """Return what two partial results are together."""
    lse = torch.logaddexp(one[1], other[1])
    out = sum(x * (own - lse).exp()[..., None] for x, own in (one, other))
    return out, lse


def in_float64(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor):
    """Return attention of some rows."""
    scores = q[:, rows].double() @ k.double().transpose(1, 2) / HEAD_DIM**0.5
    hidden = torch.arange(k.shape[1], device=k.device) > rows[:, None]
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v.double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32768)
    options = parser.parse_args()
    if options.tokens < 2 * options.ranks:
        parser.error("--tokens must be at least twice --ranks")
    if not torch.cuda.is_available():
        raise SystemExit("gpu_ring.py: needs a CUDA device, and torch has none here")
    tokens = options.tokens
    plans = build_cp_metadata_all_ranks([tokens], [tokens], cp_size=options.ranks)
    runs = [runs_of(np.asarray(plan.local_q_indices)) for plan in plans]
    q, k, v = torch.randn(3, HEADS, tokens, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    copies = torch.cuda.Stream()

    def all_ranks() -> torch.Tensor:
        out = torch.empty(HEADS, tokens, HEAD_DIM, dtype=torch.float32, device="cuda")
        for rank, plan in enumerate(plans):
            rows = torch.tensor(plan.local_q_indices, device="cuda")
            out[:, rows] = ring(rank, runs, q, k, v, copies)
        return out

    out = all_ranks()
    rows = torch.randperm(tokens, device="cuda")[:256].sort().values
    error = (out[:, rows] - in_float64(q, k, v, rows)).abs().max().item()
    print(f"{options.ranks} ranks, {tokens:,} tokens, {HEADS} heads of {HEAD_DIM}, bfloat16")
    print("chunks of each rank:", *runs)
    print(f"largest difference from float64, {len(rows)} rows: {error:.1e}")
    one_call = partial(attend, q, k, v, causal=True)
    for name, fn in {"all ranks in turn": all_ranks, "one call for all": one_call}.items():
        milliseconds = Timer("fn()", globals={"fn": fn}).timeit(10).median * 1e3
        print(f"{name}: {milliseconds:.1f} ms")
    if not error < BOUND:
        raise SystemExit("the ring does not compute attention")
    print("passed")


if __name__ == "__main__":
    main()
