# SPDX-License-Identifier: Apache-2.0
"""OpenAI's clients of the server of examples/, all at once, in a process of their own.

It prints what they measured: `python -m bench.models.clients PORT LOAD`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import asdict, dataclass

from openai import AsyncOpenAI

from bench.serving.load import Load


@dataclass
class Answered:
    """Times of a load in seconds, and the tokens of each request."""

    wall: float
    first: list[float]
    tokens: list[list[int]]


async def answers_of(port: int, work: Load) -> Answered:
    """Send all requests, and read all answers as they come."""
    client = AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=3600, max_retries=20
    )
    await client.models.list()  # the server listens
    begin = time.perf_counter()

    async def answer(prompt: list[int], length: int) -> tuple[float, list[int]]:
        pieces, first = "", 0.0
        async for event in await client.completions.create(
            model="model", prompt=prompt, max_tokens=length, temperature=0, stream=True
        ):
            first = first or time.perf_counter() - begin
            pieces += event.choices[0].text
        tokens = [int(word) for word in pieces.split()]
        assert len(tokens) == length, f"{len(tokens)} tokens of {length}"
        return first, tokens

    asked = map(answer, work.prompts, work.output_lengths)
    first, tokens = zip(*await asyncio.gather(*asked), strict=True)
    return Answered(time.perf_counter() - begin, list(first), list(tokens))


if __name__ == "__main__":
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # the server's rank is bound to one of them
    print(json.dumps(asdict(asyncio.run(answers_of(int(sys.argv[1]), Load.read(sys.argv[2]))))))
