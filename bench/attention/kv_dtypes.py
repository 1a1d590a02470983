# SPDX-License-Identifier: Apache-2.0
"""8-bit caches in decode and prefill: against cpattn's bfloat16 and the peers' 8 bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

from bench.attention import race
from bench.attention.peers import NAMES
from bench.attention.turns import Entrant, take_turns
from bench.attention.workloads import DECODE, PREFIX, Workload
from bench.harness.comparison import Bar, percent_longer, percent_of_peak, times_as_fast
from bench.harness.contender import Contender
from bench.harness.figures import Row

PEERS = ("vllm_cpu", "openvino_pa")
BASE = "cpattn, bfloat16"  # a row that only tells what another is compared with
#: Of the cache, and for what there is a scale.
FORMATS = (
    ("float8_e4m3fn", "tensor"),
    ("float8_e5m2", "tensor"),
    ("int8", "tensor"),
    ("int8", "token"),
)
SMALL = {
    "decode": Workload("decode, small", (1, 1), (99, 300)),
    "prefill": Workload("prefill, small", (16,), (64,)),
}


@dataclass(frozen=True)
class Case:
    job: str
    work: Workload  # in bfloat16
    dtype: str
    scale: str

    @property
    def name(self) -> Row:
        per = "" if self.scale == "tensor" else " per token and head"
        return {"job": self.work.name, "cache": self.dtype + per}

    @property
    def quantized(self) -> Workload:
        return replace(self.work, kv_dtype=self.dtype, kv_scale=self.scale)

    @property
    def bars(self) -> list[Bar]:
        peers = {"vLLM's FP8": NAMES["vllm_cpu"], "OpenVINO's u8": NAMES["openvino_pa"]}
        if self.job == "decode":
            return [
                percent_of_peak("cpattn", 70),
                times_as_fast("cpattn", "bfloat16", 1.6, BASE),
                *(times_as_fast("cpattn", name, 1.5, peer) for name, peer in peers.items()),
            ]
        return [
            percent_longer("cpattn", BASE, 5),
            *(times_as_fast("cpattn", name, 1.3, peer) for name, peer in peers.items()),
        ]


def cases(quick: bool) -> Iterator[Case]:
    works = SMALL if quick else {"decode": DECODE, "prefill": PREFIX}
    for job, work in works.items():
        for dtype, scale in FORMATS:
            yield Case(job, work, dtype, scale)


def run(
    case: Case, contenders: Mapping[str, Contender], num_threads: int, budget: float
) -> list[Row]:
    """The rows of a case; the contender "ours:bfloat16" is cpattn in another process."""
    with ExitStack() as folders:
        base, quantized = (
            folders.enter_context(race.data(work)) for work in (case.work, case.quantized)
        )
        entrants = []
        for module, contender in contenders.items():
            if module == "ours:bfloat16":
                entrants.append(Entrant(BASE, "ours", contender, case.work, base))
            else:
                of = case.quantized, quantized
                entrants.append(Entrant(NAMES[module], module, contender, *of))
        turns = take_turns(entrants, num_threads, budget)
    common = {"part": case.job, "case": {**case.name, "threads": num_threads}}
    return turns.rows(common, case.bars, by_bytes=case.job == "decode")
