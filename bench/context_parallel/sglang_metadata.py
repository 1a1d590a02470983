# SPDX-License-Identifier: Apache-2.0
"""The engine's computation before every context-parallel forward pass, in plain Python.

A restatement of sglang 0.5.23 in our own words, with the same steps and the same cost:
the peer of the benchmark and an oracle for the tests. Fields are lists, under the
engine's names; `as_tensors` adds the tensors the engine makes of them.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

Fields = dict[str, Any]

_PER_BLOCK = ("kv_len", "actual_seq_q")


def lengths(
    num_tokens: int, seq_lens: list[int] | None, extend_lens: list[int] | None
) -> tuple[list[int], list[int]]:
    """New tokens with padding on the last sequence, and cached prefixes."""
    extend = [
        int(n) for n in (extend_lens if extend_lens is not None else seq_lens or [num_tokens])
    ]
    padding = max(num_tokens - sum(extend), 0)
    if seq_lens is None or len(seq_lens) != len(extend):
        prefix = [0] * len(extend)
    else:
        prefix = [max(int(whole) - new, 0) for whole, new in zip(seq_lens, extend, strict=True)]
    extend[-1] += padding
    return extend, prefix


def zigzag(
    num_tokens: int,
    seq_lens: list[int] | None,
    extend_lens: list[int] | None,
    *,
    cp_rank: int,
    cp_size: int,
) -> Fields:
    extend, prefix = lengths(num_tokens, seq_lens, extend_lens)
    segments = 2 * cp_size
    blocks = []
    for length in extend:
        small, larger_blocks = divmod(length, segments)
        blocks.append([small + 1 if i < larger_blocks else small for i in range(segments)])
    owned = [[rank, segments - 1 - rank] for rank in range(cp_size)]
    fields = _layout(extend, blocks, owned, cp_rank)

    halves = {"prev": cp_rank, "next": segments - 1 - cp_rank}
    for half, block in halves.items():
        ends = [sum(sizes[: block + 1]) for sizes in blocks]
        fields[f"kv_len_{half}"] = [p + end for p, end in zip(prefix, ends, strict=True)]
        fields[f"actual_seq_q_{half}"] = [sizes[block] for sizes in blocks]
    _add_sums(fields, halves)
    for name in _PER_BLOCK:
        fields[f"{name}_combined"] = fields[f"{name}_prev"] + fields[f"{name}_next"]
    fields["cu_seqlens_q_combined"] = [0, *accumulate(fields["actual_seq_q_combined"])]
    fields["cu_seqlens_kv_combined"] = [0, *accumulate(fields["kv_len_combined"])]
    fields["max_seqlen_q_combined"] = max(fields["actual_seq_q_combined"])
    return fields


def interleave_shard_per_request(
    extend_lens: list[int], *, cp_rank: int, cp_size: int
) -> tuple[list[int], list[int]]:
    """Local rows of the sequences that have any, and these sequences, with a carried phase."""
    q_lens, bs_idx, first = [], [], cp_rank
    for s, length in enumerate(extend_lens):
        rows = max(-(-(length - first) // cp_size), 0)
        if rows:
            q_lens.append(rows)
            bs_idx.append(s)
        first += rows * cp_size - length
    return q_lens, bs_idx


def as_tensors(fields: Fields, torch: Any) -> Fields:
    """`fields` and the int32 tensors that the engine uploads in every forward pass."""
    tensors = {
        f"{name}_tensor": torch.tensor(values, dtype=torch.int32)
        for name, values in fields.items()
        if name.startswith(("kv_len", "actual_seq_q", "cu_seqlens"))
    }
    return fields | tensors


def _layout(
    extend: list[int], blocks: list[list[int]], owned: list[list[int]], cp_rank: int
) -> Fields:
    """Lists over the blocks of all sequences; owned[rank] are its blocks of each sequence."""
    bs, segments, total = len(extend), len(blocks[0]), sum(extend)
    split_list: list[int] = []
    cp_reverse_index: list[int] = []
    for s, sizes in enumerate(blocks):
        split_list.extend(sizes)
        # The first blocks of the ranks upwards, then their second ones downwards.
        step = len(owned[0]) * bs
        cp_reverse_index.extend(range(s, segments * bs, step))
        if step > bs:
            cp_reverse_index.extend(reversed(range(bs + s, segments * bs, step)))
    per_rank = [sum([sizes[i] for sizes in blocks for i in own]) for own in owned]
    fields = {
        "split_list": split_list,
        "zigzag_index": [i for own in owned[cp_rank] for i in range(own, bs * segments, segments)],
        "cp_reverse_index": cp_reverse_index,
        "reverse_split_len": [sizes[i] for own in owned for i in own for sizes in blocks],
        "per_rank_actual_token": per_rank,
        "max_rank_len": [max(per_rank)] * len(owned),
        "total_seq_lens": total,
        "bs": bs,
    }
    assert sum(split_list) == sum(per_rank) == total
    assert sorted(cp_reverse_index) == list(range(bs * segments))
    return fields


def _add_sums(fields: Fields, halves: Any) -> None:
    for half in halves:
        q_lens = fields[f"actual_seq_q_{half}"]
        fields[f"cu_seqlens_q_{half}"] = [0, *accumulate(q_lens)]
        fields[f"cu_seqlens_kv_{half}"] = [0, *accumulate(fields[f"kv_len_{half}"])]
        fields[f"total_q_{half}_tokens"] = fields[f"cu_seqlens_q_{half}"][-1]
        fields[f"max_seqlen_q_{half}"] = max(q_lens)
