# SPDX-License-Identifier: Apache-2.0
"""Few new tokens behind many cached ones, as a share of the roofline, with bars.

All numbers of new tokens query one cache: contenders take turns at all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from bench.attention import race
from bench.attention.peers import NAMES
from bench.attention.turns import Entrant, take_turns
from bench.attention.workloads import DECODE, Workload
from bench.harness.comparison import Bar, ahead_of_all, percent_longer, percent_of_peak
from bench.harness.contender import Contender, Failed
from bench.harness.figures import Row

NEW = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CACHED = (512, 8192, 65536)
CACHES = ("bfloat16", "float8_e4m3fn", "int8")
PEERS = ("vllm_cpu", "openvino_pa", "onnxruntime_gqa")
#: Bytes of a cache: in the file that all read, and in three processes at once, beside what OpenVINO
#: takes to compute. Together they stay below 8 GB.
MOST_BYTES = 1.2e9
#: ONNX Runtime has no pages and no bfloat16: a dense float32 cache for each number of new tokens.
MOST_DENSE_TOKENS = 8192
FROM = 8192  # cached tokens, for bars on the share of the roofline
DECODING = 16  # new tokens up to which reading keys is nearly all
BARS = {True: 65, False: 70}  # up to DECODING, and beyond
SHORT, LONG = 0.02, 1.0  # seconds; see `sampling.Lane`
PATIENCE = 4.0  # seconds of a peer's call: it has no turn with more new tokens
INVARIANT_BAR = 15  # percent


@dataclass(frozen=True)
class Group:
    """The cases on one cache."""

    cached: int
    batch: int
    kv_heads: int
    head_dim: int
    cache: str
    new: tuple[int, ...] = NEW

    @property
    def case(self) -> Row:
        return {
            "cached": self.cached,
            "batch": self.batch,
            "KV heads": self.kv_heads,
            "head_dim": self.head_dim,
            "cache": self.cache,
        }

    def work(self, new: int) -> Workload:
        return Workload(
            f"{new} new",
            (new,) * self.batch,
            (self.cached,) * self.batch,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.head_dim,
            kv_dtype=None if self.cache == "bfloat16" else self.cache,
            capacity=self.cached + max(self.new),
        )

    def bars(self, new: int) -> list[Bar]:
        bars = [ahead_of_all("cpattn")]
        if self.cached >= FROM:
            bars.append(percent_of_peak("cpattn", BARS[new <= DECODING]))
        return bars

    def takes_part(self, module: str) -> bool:
        if module != "onnxruntime_gqa":
            return True
        return self.batch == 1 and self.cached <= MOST_DENSE_TOKENS and self.cache == "bfloat16"


def groups(quick: bool) -> Iterator[Group]:
    if quick:
        yield Group(512, 2, 8, 64, "bfloat16", (1, 4))
        yield Group(100, 2, 4, 64, "int8", (1, 20))
        return
    for cached, batch, kv_heads, head_dim, cache in product(
        CACHED, (1, 16), (8, 4), (64, 128), CACHES
    ):
        yield Group(cached, batch, kv_heads, head_dim, cache)


def common(group: Group, new: int, num_threads: int) -> Row:
    return {"part": "extends", "case": {**group.case, "new": new, "threads": num_threads}}


def run(
    group: Group, contenders: Mapping[str, Contender], num_threads: int, budget: float
) -> Iterator[list[Row]]:
    """The rows of each number of new tokens."""
    works = {new: group.work(new) for new in group.new}
    largest = works[max(works)]
    if largest.kv_bytes > MOST_BYTES:
        why = f"keys and values of {largest.kv_bytes / 1e9:.1f} GB"
        for new in works:
            row = {"implementation": "cpattn", "status": "too large", "reason": why}
            yield [common(group, new, num_threads) | row]
        return
    with race.data(largest) as folder:
        entrants = [
            Entrant(NAMES[module], module, contender, work, folder, str(new))
            for module, contender in contenders.items()
            if group.takes_part(module)
            for new, work in works.items()
        ]
        turns = take_turns(entrants, num_threads, budget, short=SHORT, long=LONG, patience=PATIENCE)
    forget(contenders)
    for new in works:
        yield turns.rows(common(group, new, num_threads), group.bars(new), str(new))


def invariant(
    contenders: Mapping[str, Contender], num_threads: int, budget: float, quick: bool
) -> list[Row]:
    """Decode with the same bits in any batch, against the free one."""
    work = Workload("decode, small", (1, 1), (99, 99)) if quick else DECODE
    ours = "ours", contenders["ours"]
    with race.data(work) as folder:
        entrants = [
            Entrant(
                "cpattn batch_invariant", *ours, replace(work, batch_invariant=True), folder, "i"
            ),
            Entrant("cpattn", *ours, work, folder, "free"),
        ]
        turns = take_turns(entrants, num_threads, budget)
    forget({"ours": contenders["ours"]})
    bar = percent_longer("cpattn batch_invariant", "cpattn", INVARIANT_BAR)
    about = {"part": "batch_invariant", "case": {"job": work.name, "threads": num_threads}}
    return turns.rows(about, [bar], by_bytes=True)


def forget(contenders: Mapping[str, Contender]) -> None:
    for contender in contenders.values():
        with contextlib.suppress(Failed):  # who is not there has nothing
            contender.ask("forget")
