# SPDX-License-Identifier: Apache-2.0
"""What a replay is told, and what it writes down."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .._limits import check_integer, check_number
from ..traffic.trace import TRACE_BLOCK_TOKENS
from .dense.model import DenseConfig
from .model import DecoderConfig
from .phases import pass_phases

# By kind of model: the name of the baseline, and what it does.
TORCH_BASELINE = {
    "dense": ("torch SDPA", "gathers the pages of a sequence first"),
    "dsa": ("torch", "multiplies 16 queries by all keys, topk, gathers the keys of each row"),
}


@dataclass(frozen=True)
class ReplayOptions:
    """How to replay; lengths in tokens are those after scaling."""

    model: DecoderConfig = field(default_factory=DenseConfig)
    cp_size: int = 2
    strategy: str = "zigzag"
    page_size: int = 32
    token_budget: int = 4096
    pool_tokens: int = 32768
    scale_lengths: int = 8
    max_sequences: int = 64
    num_threads: int = 0  # of each rank; 0: the machine's cores divided among the ranks
    check_rows: int = 16  # of each chunk; 0: no check
    torch_baseline: bool = True
    timeout_seconds: float = 300.0
    pp_size: int = 1
    decode_tokens: int = 0  # of each request, at most; 0: nothing is decoded

    @property
    def num_ranks(self) -> int:
        """Processes that prefill."""
        return self.pp_size * self.cp_size

    @property
    def title(self) -> str:
        """Who computes what, in a few words."""
        stages = f" in each of {self.pp_size} stages" if self.pp_size > 1 else ""
        decode = ", decoding apart" if self.decode_tokens else ""
        ranks = f"{self.cp_size} rank{'s' if self.cp_size > 1 else ''}"
        return f"{self.strategy} over {ranks}{stages}{decode}"

    @property
    def num_processes(self) -> int:
        """The ranks, and one that decodes."""
        return self.num_ranks + bool(self.decode_tokens)

    @property
    def phases(self) -> tuple[str, ...]:
        """Of the time of a pass; the last one is all the rest."""
        return pass_phases(self.model.phases, self.pp_size)

    @property
    def block_tokens(self) -> int:
        return TRACE_BLOCK_TOKENS // self.scale_lengths

    def __post_init__(self) -> None:
        sizes = ("cp_size", "pp_size", "page_size", "token_budget", "pool_tokens", "max_sequences")
        for name in (*sizes, "scale_lengths"):
            check_integer("ReplayOptions", name, getattr(self, name))
        for name in ("num_threads", "check_rows", "decode_tokens"):
            check_integer("ReplayOptions", name, getattr(self, name), 0)
        check_number("ReplayOptions", "timeout_seconds", self.timeout_seconds)
        if self.pp_size > self.model.num_layers:
            raise ValueError(
                f"ReplayOptions: pp_size must be at most the {self.model.num_layers} layers, "
                f"got {self.pp_size}"
            )


@dataclass
class BatchRecord:
    """One line of the report; times in seconds, the slowest rank's total being the batch's."""

    index: int
    num_sequences: int
    num_chunks: int  # sequences that are not whole prompts: chunked prefill
    new_tokens: int
    prefix_tokens: int  # keys in the pool before the pass
    seconds: float
    phases: dict[str, float]  # mean over ranks
    flops: dict[str, int]  # useful work by phase, of all ranks
    rank_rows: list[int]
    rank_pairs: list[int]
    rank_attention_seconds: list[float]  # all phases of it
    torch_seconds: dict[str, float] | None  # attention by phase: mean over ranks
    torch_difference: float | None
    max_error: float | None = None  # against the check; None if unchecked
    # Of attention over a cache of codes, against the oracle on the same codes, in parts of what
    # roundings explain: without the error of the codes themselves.
    error_over_codes: float | None = None


@dataclass(frozen=True)
class TransferRecord:
    """What went to the decode process behind one batch; times are those of the slowest rank."""

    num_pages: int
    num_blocks: int  # contiguous on both sides, of all layers
    num_bytes: int
    plan_seconds: float
    seconds: float  # planning included


@dataclass(frozen=True)
class RequestRecord:
    """The way of one request to its second token, the first one that is decoded; in seconds."""

    index: int
    tokens: list[int]  # the first one is prefill's
    prefill_seconds: float  # all batches that it has a part in
    transfer_seconds: float  # behind these
    step_seconds: float  # 0 if prefill's is its only token


@dataclass
class DecodeReport:
    """What was measured of KV transfer and decoding."""

    transfers: list[TransferRecord] = field(default_factory=list)  # by batch
    requests: list[RequestRecord] = field(default_factory=list)
    cached_tokens: int = 0  # of prompts: in the decode pool already, so not sent
    num_steps: int = 0
    step_seconds: float = 0.0  # of all steps
    peak_bytes: int = 0
    checked_tokens: int = 0
    wrong_tokens: int = 0
    near_ties: int = 0  # tokens as good as the check's but for roundings
    max_error: float = 0.0  # of hidden states of decoded tokens

    @property
    def num_tokens(self) -> int:
        """Tokens that were decoded: without the first ones, which are prefill's."""
        return sum(len(request.tokens) - 1 for request in self.requests)


@dataclass
class ReplayReport:
    """Everything that was measured; `dataclasses.asdict` of it is the JSON report."""

    options: ReplayOptions
    environment: dict[str, Any]
    num_requests: int
    input_tokens: int
    unbounded_hit_tokens: int
    tolerance: float | None  # None: no check
    batches: list[BatchRecord] = field(default_factory=list)
    hit_tokens: int = 0
    evictions: int = 0
    checked_rows: int = 0
    checked_keys: int = 0  # that the indexer of a sparse model chose in these rows
    swapped_keys: int = 0  # of these, others than the check chose, as good but for rounding
    peak_bytes: list[int] = field(default_factory=list)  # by rank
    check_peak_bytes: int = 0  # of the parent, which runs the check
    check_seconds: float = 0.0
    wall_seconds: float = 0.0  # all of it, set-up too
    decode: DecodeReport | None = None  # of disaggregated serving

    @property
    def passed(self) -> bool:
        """Every row compared is within the tolerance, every token right (also if none was)."""
        if self.tolerance is None:
            return True
        if self.decode and (self.decode.wrong_tokens or self.decode.max_error > self.tolerance):
            return False
        return all(
            (batch.max_error or 0.0) <= self.tolerance and (batch.error_over_codes or 0.0) <= 1
            for batch in self.batches
        )

    @property
    def torch_seconds(self) -> dict[str, float]:
        """Attention of all batches by torch, by phase; empty without the baseline."""
        batches = [batch.torch_seconds for batch in self.batches if batch.torch_seconds]
        return {phase: sum(b[phase] for b in batches) for phase in (batches[0] if batches else ())}

    @property
    def new_tokens(self) -> int:
        return sum(batch.new_tokens for batch in self.batches)

    @property
    def run_seconds(self) -> float:
        """Forward passes only: neither set-up nor check nor baseline."""
        return sum(batch.seconds for batch in self.batches)
