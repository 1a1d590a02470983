# SPDX-License-Identifier: Apache-2.0
"""Messages to ranks, and their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..processes.hosts import Hosts
from ..processes.workers import Role, Workers
from .phases import over_pools, pass_phases

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpattn.kv import Placement
    from cpattn.scheduling.scheduler import Batch

    from .disaggregation.endpoint import Transfer
    from .disaggregation.handover import Delivery
    from .model import DecoderConfig

RANK = "cpattn_lab.replay.rank.Rank"


@dataclass(frozen=True)
class WorkerConfig:
    """Configuration that every rank gets once."""

    model: DecoderConfig
    cp_size: int
    strategy: str
    page_size: int
    num_pages: int  # pages in the KV pool of a rank, without its dummy page
    num_threads: int
    torch_baseline: bool
    timeout_seconds: float
    pp_size: int = 1
    num_slots: int = 0  # slots for first tokens of a decode process; 0: there is none
    placement: Placement | None = None  # tells which rank has which keys; None: all have all
    exchange: str = "auto"
    weights: tuple[int, ...] | None = None  # speeds of ranks; None: equal ones
    address: str = "127.0.0.1"  # address of this rank's host

    @property
    def phases(self) -> tuple[str, ...]:
        is_sharded = self.placement is not None
        return pass_phases(over_pools(self.model.phases, is_sharded=is_sharded), self.pp_size)


@dataclass(frozen=True)
class Work:
    """Work of one batch that every rank gets."""

    batch: Batch
    token_ids: npt.NDArray[Any]  # int64 [new tokens]
    rows: npt.NDArray[Any]  # int64: rows of the result to return
    delivery: Delivery | None = None  # what to send to the decode process


@dataclass(frozen=True)
class RankResult:
    """Result of one rank for one batch; times in seconds."""

    seconds: dict[str, float]  # seconds by phase; their sum is the time of the pass
    flops: dict[str, int]  # useful work of the phases that attention consists of
    num_rows: int  # query rows of this rank
    num_pairs: int  # query-key pairs of this rank, in one head of one layer
    peak_bytes: int  # peak of resident memory so far, without the baseline's
    rows: npt.NDArray[Any] | None  # float32 [wanted rows, hidden_size], from one rank
    chosen: npt.NDArray[Any] | None  # int32 [wanted rows, topk], of a sparse model, from that rank
    torch_seconds: dict[str, float] | None  # attention of all layers by the baseline, by phase
    torch_difference: float | None  # largest |attention - baseline|
    transfer: Transfer | None  # transfer to the decode process, if there is one
    # Largest error of attention over codes, in the wanted rows of this rank, against the oracle on
    # the same codes; in units of expected rounding.
    error_over_codes: float | None = None
    sent_bytes: int = 0  # bytes to other ranks of the stage, in the pass
    pool_bytes: int = 0  # size of the KV pool
    exchange: str = "gather"  # exchange of queries and keys


def ranks_of(config: WorkerConfig) -> list[Role]:
    """Return the ranks of all pipeline stages, stage by stage."""
    return [
        Role(f"rank {rank}", RANK, rank, config) for rank in range(config.pp_size * config.cp_size)
    ]


def on_hosts(roles: Sequence[Role], hosts: Hosts | None) -> list[Role]:
    """Place roles on hosts, equally many consecutive ones on each; None: all on this host."""
    if hosts is None:
        return list(roles)
    placed = []
    for i, role in enumerate(roles):
        host = i * hosts.num_hosts // len(roles)
        config = replace(role.config, address=hosts.address(host))
        placed.append(replace(role, config=config, namespace=hosts.path(host)))
    return placed


def run(workers: Workers, work: Work) -> list[RankResult]:
    """Run one batch on all ranks; return results in rank order. WorkerError if a rank fails."""
    ranks = workers.numbered(RANK)
    workers.call(ranks, "run", work)
    return workers.answers(ranks)
