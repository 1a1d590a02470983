# SPDX-License-Identifier: Apache-2.0
"""Options of a replay, and its records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cpattn._limits import check_integer
from cpattn.context_parallel.exchanges import ON_ALL_RANKS, PLACEMENTS
from cpattn.context_parallel.placement_name import (
    BY_PAGES,
    BY_TOKENS,
    REPLICATED,
    PlacementName,
)

from ..limits import check_number
from ..processes.hosts import MAX_HOSTS
from ..traffic.trace import TRACE_BLOCK_TOKENS
from .dense.model import DenseConfig
from .model import DecoderConfig
from .phases import over_pools, pass_phases

# Name and description of the baseline, by kind of model.
TORCH_BASELINE = {
    "dense": ("torch SDPA", "gathers the pages of a sequence first"),
    "dsa": ("torch", "multiplies 16 queries by all keys, topk, gathers the keys of each row"),
}


@dataclass(frozen=True)
class ReplayOptions:
    """Options of a replay; lengths are in tokens, after scaling."""

    model: DecoderConfig = field(default_factory=DenseConfig)
    cp_size: int = 2
    strategy: str = "zigzag"
    weights: tuple[int, ...] | None = None  # speeds of the ranks of a stage; None: equal ones
    page_size: int = 32
    token_budget: int = 4096
    pool_tokens: int = 32768
    scale_lengths: int = 8
    max_sequences: int = 64
    num_threads: int = 0  # threads of each rank; 0: the machine's cores divided among the ranks
    check_rows: int = 16  # rows to check of each chunk; 0: no check
    torch_baseline: bool = True
    timeout_seconds: float = 300.0
    pp_size: int = 1
    decode_tokens: int = 0  # most tokens to decode of each request; 0: nothing is decoded
    placement: str = REPLICATED  # placement of keys in the ranks' pools
    exchange: str = "auto"  # exchange of queries and keys between ranks
    decode_ranks: int = 1  # processes that decode, each with a share of the pages
    hosts: int = 1  # network namespaces, each with equally many consecutive ranks
    link_gbps: float | None = None  # rate of each host's cable; None: no limit

    @property
    def placement_name(self) -> PlacementName:
        """`placement`, parsed."""
        name = PlacementName.parse(self.placement)
        assert name
        return name

    @property
    def is_sharded(self) -> bool:
        """Whether a rank's pool has only a part of the keys."""
        return self.placement != REPLICATED

    @property
    def num_pages(self) -> int:
        """Pages available for prompts, in one pool or in those of all ranks together."""
        return self.placement_name.whole_pages(self.pool_tokens // self.page_size, self.cp_size)

    @property
    def rank_pages(self) -> int:
        """Pages of the pool of one rank, without its page 0."""
        return self.placement_name.rank_pages(self.num_pages, self.cp_size, self.page_size)

    @property
    def page_shards(self) -> int:
        """Number of ranks that split whole pages; 1 if they split none, or tokens."""
        return self.cp_size if self.placement_name.kind == BY_PAGES else 1

    @property
    def num_ranks(self) -> int:
        """Number of prefill processes."""
        return self.pp_size * self.cp_size

    @property
    def title(self) -> str:
        """Short description: ranks, stages, hosts and pools."""
        stages = f" in each of {self.pp_size} stages" if self.pp_size > 1 else ""
        over = f" over {self.decode_ranks} ranks" if self.decode_ranks > 1 else ""
        decode = f", decoding apart{over}" if self.decode_tokens else ""
        ranks = f"{self.cp_size} rank{'s' if self.cp_size > 1 else ''}"
        pools = f", {self.placement} by {self.exchange}" if self.is_sharded else ""
        link = f" with {self.link_gbps:g} Gbit/s" if self.link_gbps else ""
        hosts = f" on {self.hosts} hosts{link}" if self.hosts > 1 else ""
        weights = f" by {':'.join(map(str, self.weights))}" if self.weights else ""
        return f"{self.strategy}{weights} over {ranks}{stages}{hosts}{pools}{decode}"

    @property
    def num_processes(self) -> int:
        """Number of prefill and decode processes."""
        return self.num_ranks + (self.decode_ranks if self.decode_tokens else 0)

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases of the time of a pass; the last one is the rest."""
        return pass_phases(over_pools(self.model.phases, is_sharded=self.is_sharded), self.pp_size)

    @property
    def attention_phases(self) -> tuple[str, ...]:
        """Phases that the torch baseline has, too."""
        return over_pools(self.model.attention_phases, is_sharded=self.is_sharded)

    @property
    def block_tokens(self) -> int:
        return TRACE_BLOCK_TOKENS // self.scale_lengths

    def __post_init__(self) -> None:
        sizes = ("cp_size", "pp_size", "page_size", "token_budget", "pool_tokens", "max_sequences")
        for name in (*sizes, "scale_lengths", "decode_ranks", "hosts"):
            check_integer("ReplayOptions", name, getattr(self, name))
        for name in ("num_threads", "check_rows", "decode_tokens"):
            check_integer("ReplayOptions", name, getattr(self, name), 0)
        check_number("ReplayOptions", "timeout_seconds", self.timeout_seconds)
        if self.pp_size > self.model.num_layers:
            raise ValueError(
                f"ReplayOptions: pp_size must be at most the {self.model.num_layers} layers, "
                f"got {self.pp_size}"
            )
        self._check_placement()
        self._check_decoding()
        self._check_hosts()

    def _check_placement(self) -> None:
        function, model = "ReplayOptions", self.model
        if not isinstance(self.placement, str) or not PlacementName.parse(self.placement):
            raise ValueError(
                f"{function}: placement must be {', '.join(PLACEMENTS)} or {BY_TOKENS}:I, got "
                f"{self.placement!r}"
            )
        if self.exchange not in ("auto", *ON_ALL_RANKS):
            raise ValueError(
                f"{function}: exchange must be auto, {', '.join(ON_ALL_RANKS)}, got "
                f"{self.exchange!r}"
            )
        if not self.is_sharded and self.exchange not in ("auto", "gather"):
            raise ValueError(
                f"{function}: exchange must be auto or gather where the placement is "
                f"{REPLICATED}, got {self.exchange}"
            )
        if not isinstance(model, DenseConfig):
            self._check_sparse_placement()
        elif self.is_sharded and model.scale_dtype and self.exchange not in ("auto", "pass_q"):
            raise ValueError(
                f"{function}: exchange must be auto or pass_q for int8, which has scales of each "
                f"token, got {self.exchange}"
            )
        if not self.num_pages:
            raise ValueError(
                f"{function}: pool_tokens must be at least a page of each rank, "
                f"{self.page_shards * self.page_size}, got {self.pool_tokens}"
            )

    def _check_sparse_placement(self) -> None:
        function, model = "ReplayOptions", self.model
        if not self.is_sharded:
            return
        if self.decode_tokens or getattr(model, "kv_dtype", "bf16") != "bf16":
            raise ValueError(
                f"{function}: placement must be {REPLICATED} for the model {model.kind} in fp8, or "
                f"where pages are sent to be decoded, got {self.placement}"
            )
        if self.exchange not in ("auto", "gather", "pass_q"):
            raise ValueError(
                f"{function}: exchange must be auto, gather or pass_q for the model {model.kind}, "
                f"got {self.exchange}"
            )

    def _check_decoding(self) -> None:
        function = "ReplayOptions"
        if self.decode_tokens and self.placement_name.kind == BY_TOKENS:
            raise ValueError(
                f"{function}: placement must be {REPLICATED} or {BY_PAGES} where pages are sent "
                f"to be decoded, got {self.placement}"
            )
        if self.decode_ranks > 1 and not isinstance(self.model, DenseConfig):
            raise ValueError(
                f"{function}: decode_ranks must be 1 for the model {self.model.kind}, got "
                f"{self.decode_ranks}"
            )
        if self.decode_ranks > 1 and not self.decode_tokens:
            raise ValueError(
                f"{function}: decode_ranks must be 1 where nothing is decoded, got "
                f"{self.decode_ranks}"
            )

    def _check_hosts(self) -> None:
        function = "ReplayOptions"
        if self.hosts > MAX_HOSTS or self.num_ranks % self.hosts:
            raise ValueError(
                f"{function}: hosts must divide the {self.num_ranks} ranks that prefill, and be "
                f"at most {MAX_HOSTS}, got {self.hosts}"
            )
        if self.link_gbps is not None:
            check_number(function, "link_gbps", self.link_gbps)
            if self.hosts == 1:
                raise ValueError(
                    f"{function}: link_gbps must have hosts whose cables have that rate, got "
                    f"{self.link_gbps:g} and one host"
                )


@dataclass
class BatchRecord:
    """One line of the report; times are in seconds; the slowest rank's total is the batch's."""

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
    rank_attention_seconds: list[float]  # sum of its phases
    torch_seconds: dict[str, float] | None  # attention by phase: mean over ranks
    torch_difference: float | None
    max_error: float | None = None  # against the check; None if unchecked
    # Largest error of attention over codes against the oracle on the same codes, in units of
    # expected rounding; the error of the codes themselves is not part of it.
    error_over_codes: float | None = None
    # Bytes that each rank has sent to other ranks of its stage.
    rank_sent_bytes: list[int] = field(default_factory=list)
    exchange: str = "gather"  # exchange of queries and keys; "auto" may choose one per batch


@dataclass(frozen=True)
class TransferRecord:
    """Transfer to the decode process after one batch; times of the slowest rank."""

    num_pages: int
    num_blocks: int  # contiguous on both sides, of all layers
    num_bytes: int
    plan_seconds: float
    seconds: float  # planning included


@dataclass(frozen=True)
class RequestRecord:
    """Times of one request until its second token, the first decoded one; in seconds."""

    index: int
    tokens: list[int]  # the first one is prefill's
    prefill_seconds: float  # time of all batches with tokens of the prompt
    transfer_seconds: float  # time of the transfers after these batches
    step_seconds: float  # 0 if prefill computes the only token


@dataclass
class DecodeReport:
    """Measures of KV transfer and decoding."""

    transfers: list[TransferRecord] = field(default_factory=list)  # one for each batch
    requests: list[RequestRecord] = field(default_factory=list)
    cached_tokens: int = 0  # prompt tokens that the decode pool already had; they are not sent
    num_steps: int = 0
    step_seconds: float = 0.0  # time of all steps
    peak_bytes: int = 0  # peak of the process with most
    pool_bytes: list[int] = field(default_factory=list)  # size on each decode rank
    sent_bytes: int = 0  # sum over all decode ranks, between them
    checked_tokens: int = 0
    wrong_tokens: int = 0
    near_ties: int = 0  # tokens as good as the check's, up to rounding
    max_error: float = 0.0  # largest in hidden states of decoded tokens

    @property
    def num_tokens(self) -> int:
        """Number of decoded tokens, without the first ones, which prefill computes."""
        return sum(len(request.tokens) - 1 for request in self.requests)


@dataclass(frozen=True)
class ReplicatedRecord:
    """Record of the same traffic over replicated pools; bytes of the rank with most."""

    run_seconds: float
    new_tokens: int
    pool_bytes: int
    peak_bytes: int
    sent_bytes: int  # sum over all ranks
    compared_rows: int
    difference: float  # largest difference of their hidden states


@dataclass
class ReplayReport:
    """All measurements; `dataclasses.asdict` of it is the JSON report."""

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
    checked_keys: int = 0  # keys that the indexer of a sparse model chose in these rows
    swapped_keys: int = 0  # keys among them that the check did not choose, equal up to rounding
    peak_bytes: list[int] = field(default_factory=list)  # peak of each rank
    pool_bytes: list[int] = field(default_factory=list)  # each rank's KV pool of its layers
    link_bytes: list[int] = field(default_factory=list)  # bytes that each host's cable brought
    check_peak_bytes: int = 0  # peak of the parent, which runs the check
    check_seconds: float = 0.0
    wall_seconds: float = 0.0  # time of the whole replay, with set-up
    decode: DecodeReport | None = None  # None unless prefill and decoding are apart
    replicated: ReplicatedRecord | None = None  # the replay compared with this one

    @property
    def passed(self) -> bool:
        """Whether all compared rows are within the tolerance, if any, and all tokens correct."""
        if self.tolerance is None:
            return True
        # Each of the two replays may be off by the tolerance.
        if self.replicated and not self.replicated.difference <= 2 * self.tolerance:
            return False
        if self.decode and (self.decode.wrong_tokens or self.decode.max_error > self.tolerance):
            return False
        return all(
            (batch.max_error or 0.0) <= self.tolerance and (batch.error_over_codes or 0.0) <= 1
            for batch in self.batches
        )

    @property
    def torch_seconds(self) -> dict[str, float]:
        """Seconds of torch's attention in all batches, by phase; empty without the baseline."""
        batches = [batch.torch_seconds for batch in self.batches if batch.torch_seconds]
        return {phase: sum(b[phase] for b in batches) for phase in (batches[0] if batches else ())}

    @property
    def new_tokens(self) -> int:
        return sum(batch.new_tokens for batch in self.batches)

    @property
    def run_seconds(self) -> float:
        """Seconds of forward passes only, without set-up, check and baseline."""
        return sum(batch.seconds for batch in self.batches)
