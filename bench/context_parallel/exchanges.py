# SPDX-License-Identifier: Apache-2.0
"""Ways to bring queries and keys of two hosts together: runs and predictions."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from statistics import median
from typing import Any

from cpattn_lab.cost_model import AttentionLayer, Rates, exchange_work, predict
from cpattn_lab.processes.hosts import Hosts

PROBE_BYTES = 16 << 20  # from each rank, to know the rate of the link


@dataclass(frozen=True)
class Shape:
    """One request."""

    new: int
    cached: int

    @property
    def name(self) -> str:
        return f"{self.new} new behind {self.cached}"


@dataclass(frozen=True)
class Way:
    """A way to run a layer, from new rows of each rank to attention of each rank's rows."""

    name: str
    exchange: str
    sharded: bool
    overlapped: bool = True
    ahead: bool = False  # cached keys travel while the layer before is computed


WAYS = (
    Way("replicated, in turns", "gather", sharded=False, overlapped=False),
    Way("replicated", "gather", sharded=False),
    Way("gather, in turns", "gather", sharded=True, overlapped=False),
    Way("gather", "gather", sharded=True),
    Way("ring", "ring", sharded=True),
    Way("pass_q", "pass_q", sharded=True),
    Way("all_to_all", "all_to_all", sharded=True),
)
#: A layer of several, where there are cached keys.
AHEAD = Way("gather, one layer ahead", "gather", sharded=True, ahead=True)


@dataclass(frozen=True)
class Settings:
    """The measurements of a world of ranks."""

    shapes: tuple[Shape, ...]
    rounds: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    ring_flash_attn: str = ""  # the folder of its wheel

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        values = json.loads(text)
        values["shapes"] = tuple(Shape(**shape) for shape in values["shapes"])
        return cls(**values)

    @property
    def layer(self) -> AttentionLayer:
        return AttentionLayer(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
            page_size=128,
        )  # fmt: skip


def run_world(hosts: Hosts, size: int, settings: Settings) -> dict[str, Any]:
    """The answer of rank 0; ranks 0 to size / 2 - 1 are on the first host."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(size):
            path = hosts.path(rank * hosts.num_hosts // size)
            program = [
                *(sys.executable, "-m", "bench.context_parallel.exchange_rank"),
                *(str(rank), str(size), f"file://{folder}/store", path, settings.to_json()),
            ]
            ranks.append(subprocess.Popen(program, stdout=subprocess.PIPE, text=True))
        answers = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"ranks ended with {[rank.returncode for rank in ranks]}")
    answer: dict[str, Any] = json.loads(answers[0].strip().splitlines()[-1])
    return answer


def link_bytes_per_second(answer: dict[str, Any], size: int) -> float:
    """The rate of a host, in one direction."""
    return size // 2 * PROBE_BYTES / float(answer["link"])


def rates_of(rates: Rates, way: Way, size: int, cpus: int, bytes_per_second: float) -> Rates:
    """The rates of a rank if `size` ranks are on two hosts and share CPUs and the link.

    The model has hosts of one rank each. With 4 ranks two are on a host, and each sends to 3
    others, 2 of them over the link: both send 4/3 of the bytes that they would send with a link
    each. In a ring only one of the two sends over the link.
    """
    crowd = max(1.0, size / cpus)
    share = 1.0 if size == 2 or way.exchange == "ring" else 0.75
    return dataclasses.replace(
        rates,
        gflops=rates.gflops / crowd,
        store_gb_per_s=rates.store_gb_per_s / crowd,
        merge_ns=rates.merge_ns * crowd,
        gather_gb_per_s=share * bytes_per_second / 1e9,
    )


def predicted(
    shape: Shape, way: Way, size: int, settings: Settings, rates: Rates
) -> tuple[float, float]:
    """Seconds of a layer, and the seconds for which the link is busy."""
    batch = [shape.new], [shape.new + shape.cached]
    placement = "page_interleave" if way.sharded else "replicated"
    overlap = "ahead" if way.ahead else "full" if way.overlapped else "none"
    forecast = predict(
        [batch], settings.layer, rates, cp_size=size, placement=placement, exchange=way.exchange,
        overlap=overlap, state_dtype=settings.layer.dtype,
    )  # fmt: skip
    work = exchange_work(
        *batch, cp_size=size, placement=placement, exchange=way.exchange, layer=settings.layer,
        state_dtype=settings.layer.dtype,
    )  # fmt: skip
    return forecast.layer_seconds, float(work.wire_bytes.sum(0).max()) / (
        1e9 * rates.gather_gb_per_s
    )


def medians(answer: dict[str, Any], shape: Shape) -> dict[str, float]:
    return {name: median(times) for name, times in answer["shapes"][shape.name].items()}
