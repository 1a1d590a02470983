# SPDX-License-Identifier: Apache-2.0
"""A load from a trace of requests: prompts as token ids, lengths of the answers, arrivals."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from pathlib import Path

from cpattn.scheduling.request import Request
from cpattn_lab.traffic.trace import (
    TRACE_BLOCK_TOKENS,
    block_tokens_of,
    generate_trace,
    read_trace,
    scale_lengths,
)

TICK = 3.0  # seconds that the time stamps of the traces are apart


@dataclass(frozen=True)
class Load:
    """Requests in the order of their arrival."""

    prompts: list[list[int]]
    output_lengths: list[int]
    arrivals: list[float]  # of the trace, seconds
    span: float  # seconds of the trace that they come from

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def max_tokens(self) -> int:
        """The most tokens of a prompt with its answer."""
        return max(map(sum, zip(map(len, self.prompts), self.output_lengths, strict=True)))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: str) -> Load:
        return Load(**json.loads(Path(path).read_text()))


def from_arguments(arguments: argparse.Namespace, vocab_size: int) -> Load:
    """The beginning of the given trace, or of a generated one."""
    if arguments.trace:
        requests = read_trace(arguments.trace, limit=arguments.requests)
    else:
        requests = generate_trace(arguments.requests, seed=arguments.seed)
    divisor = arguments.scale_lengths
    return from_trace(requests, divisor, vocab_size=vocab_size, seed=arguments.seed)


def from_trace(requests: Sequence[Request], divisor: int, *, vocab_size: int, seed: int) -> Load:
    """All lengths divided; equal blocks of the trace are equal tokens."""
    scaled = scale_lengths(requests, divisor)
    prompts = [
        block_tokens_of(
            request,
            0,
            request.input_length,
            block_tokens=TRACE_BLOCK_TOKENS // divisor,
            vocab_size=vocab_size,
            seed=seed,
        ).tolist()
        for request in scaled
    ]
    arrivals, span = spread([request.timestamp / 1000 for request in requests])
    return Load(prompts, [max(1, request.output_length) for request in scaled], arrivals, span)


def spread(stamps: Sequence[float]) -> tuple[list[float], float]:
    """Arrivals from time stamps that many requests share, and their span in seconds.

    Requests with one stamp are spread evenly over the time to the next stamp.
    """
    groups = [(stamp - stamps[0], len(list(group))) for stamp, group in groupby(stamps)]
    groups.append((groups[-1][0] + TICK, 0))
    arrivals = [
        begin + i * (end - begin) / size
        for (begin, size), (end, _) in pairwise(groups)
        for i in range(size)
    ]
    return arrivals, groups[-1][0]
