# SPDX-License-Identifier: Apache-2.0
"""Operators under the names of torch_npu, and the functions that they call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import cpattn
from bench.torch_ops.calls import Form, in_turns
from cpattn.integrations import torch_npu

with torch_npu.install():  # registers them
    OPERATORS = torch.ops.npu

PAGE, HEADS, DIM = 16, 4, 16


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def forms(name: str, *arguments: Any, **options: Any) -> tuple[Form, Form]:
    """The function and the operator of a name, with their arguments."""
    function, operator = (getattr(owner, name) for owner in (cpattn.npu, OPERATORS))
    return partial(function, *arguments, **options), partial(operator, *arguments, **options)


def attention(batch: int, as_tensors: bool) -> tuple[Form, Form]:
    """One query of each sequence, in sglang's form."""
    q, cache = torch.ones(batch, HEADS, DIM), torch.ones(4, PAGE, DIM)
    lengths = {"actual_seq_lengths": range(1, batch + 1), "actual_seq_lengths_kv": [1] * batch}
    return forms(
        "npu_fused_infer_attention_score",
        *(q, cache, cache),
        block_table=torch.zeros(batch, 1, dtype=torch.int32),
        block_size=PAGE,
        num_heads=HEADS,
        num_key_value_heads=1,
        input_layout="TND",
        atten_mask=torch.ones(2048, 2048, dtype=torch.bool).triu(1),
        sparse_mode=3,
        scale=0.25,
        **{name: ints(*n) if as_tensors else list(n) for name, n in lengths.items()},
    )


def sparse(name: str, key_lengths: str, *arguments: Any, **options: Any) -> tuple[Form, Form]:
    """Two tokens of one sequence."""
    options |= {"actual_seq_lengths_query": ints(2), key_lengths: ints(2)}
    options |= {"block_table": ints(0)[None], "layout_query": "TND"}
    return forms(name, *arguments, **options)


def scatter(num_rows: int, *row: int) -> tuple[Form, Form]:
    buffer = torch.zeros(25 * num_rows, *row).bfloat16()
    rows = torch.ones(num_rows, *row).bfloat16()
    slots = torch.randperm(len(buffer))[:num_rows, None]
    return (
        lambda: buffer.index_put_((slots[:, 0],), rows),
        lambda: OPERATORS.npu_scatter_nd_update_(buffer, slots, rows),
    )


def jobs() -> Iterator[tuple[str, Form, Form]]:
    yield "npu_fused_infer_attention_score, 1 sequence", *attention(1, False)
    yield "the same, 64 sequences, lengths in lists", *attention(64, False)
    yield "the same, lengths in tensors", *attention(64, True)
    q, k, indices = torch.ones(2, HEADS, DIM), torch.ones(4, PAGE, 1, DIM), ints(0, 1).view(2, 1, 1)
    yield (
        "npu_lightning_indexer",
        *sparse(
            "npu_lightning_indexer",
            "actual_seq_lengths_key",
            *(q, k, torch.ones(2, HEADS)),
            layout_key="PA_BSND",
            sparse_count=4,
        ),
    )
    yield (
        "npu_sparse_flash_attention",
        *sparse(
            "npu_sparse_flash_attention",
            "actual_seq_lengths_kv",
            *(q, k, k, indices, 0.25),
            layout_kv="PA_BSND",
        ),
    )
    yield "npu_scatter_nd_update_, 2 rows", *scatter(2, HEADS, DIM)
    yield "npu_scatter_nd_update_, 4096 rows of 2 KB", *scatter(4096, 8, 128)


def measure(function: Form, operator: Form, rounds: int) -> list[float]:
    """Microseconds of the function, and of the operator's overhead, also in inference mode."""
    torch.testing.assert_close(operator(), function(), rtol=0, atol=0)
    pair = {"function": function, "operator": operator}
    times = in_turns(pair, rounds)
    with torch.inference_mode():
        inference = in_turns(pair, rounds)
    added = [taken["operator"] - taken["function"] for taken in (times, inference)]
    return [times["function"], *added]
