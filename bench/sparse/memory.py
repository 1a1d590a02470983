# SPDX-License-Identifier: Apache-2.0
"""Memory that the indexer takes beyond inputs and outputs, each call in its own process.

``python -m bench.sparse.memory IMPLEMENTATION TOKENS KV THREADS`` prints the bytes of one.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

import cpattn
from bench.harness import worker
from bench.harness.figures import Row
from bench.sparse import THREADS
from bench.sparse.indexer import BLOCKS, ROWS, TOPK, Inputs, score_blocks, score_rows, torch_topk

IMPLEMENTATIONS = ("cpattn bf16", BLOCKS, ROWS)


NEW = 512  # queries


def rows(quick: bool) -> Iterator[Row]:
    """A row for each implementation and length, the failed ones too."""
    first = None  # ours, at the shortest length
    for kv_len in (NEW,) if quick else (4096, 131072):
        for name in IMPLEMENTATIONS:
            case = {"job": "memory of the indexer", "new": NEW, "KV": kv_len, "threads": THREADS}
            row: Row = {"part": "memory", "case": case, "implementation": name}
            row |= in_child(name, NEW, kv_len, THREADS)
            if name == IMPLEMENTATIONS[0] and row["status"] == "ok":
                if first:
                    row["bars"] = [growth(first, row)]
                first = first or row
            yield row


def growth(first: Row, row: Row) -> Row:
    """The bar of the indexer: memory that does not grow with the length of full buffers.

    Its buffers of candidates are not full at the shortest length.
    """
    more = (row["extra_memory"] - first["extra_memory"]) / 2**20
    name = f"MiB more than at KV {first['case']['KV']}"
    return {"name": name, "value": more, "limit": 1, "at_least": False, "met": more <= 1}


def in_child(name: str, num_tokens: int, kv_len: int, num_threads: int) -> Row:
    numbers = map(str, (num_tokens, kv_len, num_threads))
    done = subprocess.run(
        [sys.executable, "-m", "bench.sparse.memory", name, *numbers],
        env=worker.child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"status": "error", "reason": reason}
    return {"status": "ok", "extra_memory": int(done.stdout)}


def call(name: str, inputs: Inputs) -> Callable[[], Any]:
    if name in (BLOCKS, ROWS):
        score = score_blocks if name == BLOCKS else score_rows
        return lambda: torch_topk(inputs, score(inputs), TOPK)()
    return lambda: cpattn.sparse.indexer_topk(
        inputs.q, inputs.k, inputs.weights, inputs.ks, inputs.ke, topk=TOPK, sorted=False
    )


def main() -> None:
    name, num_tokens, kv_len, num_threads = sys.argv[1], *map(int, sys.argv[2:])
    cpattn.set_num_threads(num_threads)
    torch.set_num_threads(num_threads)
    call(name, Inputs(32, 64, 64))()  # starts threads, loads libraries
    inputs = Inputs(num_tokens, kv_len, 64)
    run = call(name, inputs)
    _ = inputs.q, inputs.k, inputs.weights, inputs.ks, inputs.ke  # made when asked for: here
    gc.collect()
    extra, result = worker.extra_memory(run)
    print(max(0, extra - sum(part.nbytes for part in result)))


if __name__ == "__main__":
    main()
