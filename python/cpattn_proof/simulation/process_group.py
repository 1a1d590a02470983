# SPDX-License-Identifier: Apache-2.0
"""Process group for the programs: every call of c10d as data given and taken by ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from ..findings import Finding, NotUsable
from . import memory
from .calls import Blocks, Call, Group, site_of_caller
from .reductions import name_of

Tensors = Sequence[torch.Tensor]
#: Calls that cut one tensor for all ranks.
CUTS_ROWS = (
    "all_to_all_single", "reduce_scatter_tensor", "all_gather_into_tensor", "gather_single",
)  # fmt: skip


class Runtime(Protocol):
    """Interface that carries calls out."""

    def begin(self, call: Call) -> dist.Work: ...
    def refute(self, finding: Finding) -> NoReturn: ...


class _Backend:
    """Stand-in for the backend of a device, with a name unknown to torch."""

    supports_coalescing = supports_splitting = False

    def name(self) -> str:
        return "simulated"


class SimulatedGroup(dist.ProcessGroup):
    """Group of a rank; the simulation carries out its calls.

    Methods have the names and arguments that `torch.distributed` and torch's functional collectives
    call; torch's stubs have more.
    """

    def __init__(self, group: Group, rank: int, backend: str, runtime: Runtime) -> None:
        super().__init__(rank, len(group.ranks))  # type: ignore[call-arg]
        self.group = group
        self._rank = rank
        self._backend = backend
        self._runtime = runtime

    def getBackendName(self) -> str:
        return self._backend

    name = getBackendName  # until torch 2.6

    def _get_backend(self, device: Any) -> Any:
        """Return a backend without abilities: since torch 2.14, batched messages ask for them."""
        return _Backend()

    def _has_hooks(self) -> bool:
        return False

    def set_timeout(self, timeout: Any) -> None:
        """Ignore the timeout: waits end when no rank can go on."""

    def size(self) -> int:
        return len(self.group.ranks)

    def rank(self) -> int:
        return self._rank

    @property
    def group_name(self) -> Any:  # a special string type from torch 2.10 on
        return self.group.name

    @property
    def pg_name(self) -> str:
        return self.group.name

    @property
    def group_desc(self) -> str:
        return str(self.group)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def meet(self) -> None:
        """Wait until all ranks make the group, like backends that connect them."""
        self._begin("new_group").wait()

    def shutdown(self) -> None:
        """Do nothing, as nothing is open."""

    def abort(self) -> None:
        """Do nothing, as nothing is open."""

    def _begin(self, kind: str, **parts: Any) -> dist.Work:
        for blocks in (parts.get("gives", {}), parts.get("takes", {})):
            _check([tensor for block in blocks.values() for tensor in block], kind)
        _check(parts.get("reduces", []), kind)
        call = Call(kind, self.group, self._rank, site_of_caller(), **parts)
        if fault := memory.fault_of(call):
            self._runtime.refute(fault)
        memory.take_as_it_lies(call)
        return self._runtime.begin(call)

    def _to_all(self, tensors: Tensors) -> Blocks:
        return {rank: list(tensors) for rank in range(self.size())}

    def _blocks(self, lists: Sequence[Tensors]) -> Blocks:
        """Transpose `[tensor][rank]` to `{rank: [tensors]}`."""
        return {rank: [of_ranks[rank] for of_ranks in lists] for rank in range(len(lists[0]))}

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        return self._reduced_by_all("all_reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self._reduced_by_all("all_reduce_coalesced", tensors, opts)

    def _reduced_by_all(self, kind: str, tensors: Any, opts: Any) -> dist.Work:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        op = _operator(opts)
        return self._begin(
            kind, terms=_terms(op), gives=self._to_all(tensors), reduces=list(tensors), op=op
        )

    def broadcast(self, tensors: Any, opts: Any) -> dist.Work:  # type: ignore[override]
        root = opts.rootRank
        if self._rank == root:
            gives = {rank: list(tensors) for rank in range(self.size()) if rank != root}
            return self._begin("broadcast", terms={"root": self._world(root)}, gives=gives)
        return self._begin("broadcast", terms={"root": self._world(root)}, takes={root: tensors})

    def reduce(self, tensors: Any, opts: Any) -> dist.Work:  # type: ignore[override]
        root, op = opts.rootRank, _operator(opts)
        reduces = list(tensors) if self._rank == root else []
        return self._begin(
            "reduce",
            terms={"root": self._world(root), **_terms(op)},
            gives={root: list(tensors)},
            reduces=reduces,
            op=op,
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        self._check_ranks("all_gather", outputs)
        return self._begin("all_gather", gives=self._to_all(inputs), takes=self._blocks(outputs))

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        takes = {rank: list(blocks) for rank, blocks in enumerate(outputs)}
        return self._begin("all_gather_coalesced", gives=self._to_all(inputs), takes=takes)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        kind = "all_gather_into_tensor"
        return self._begin(
            kind,
            gives=self._to_all(inputs),
            takes=self._blocks([self._cut(kind, output) for output in outputs]),
        )

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:  # type: ignore[override]
        root = opts.rootRank
        takes = self._blocks(outputs) if self._rank == root else {}
        return self._begin(
            "gather", terms={"root": self._world(root)}, gives={root: list(inputs)}, takes=takes
        )

    def gather_single(self, output: Any, input: Any, opts: Any) -> dist.Work:
        root, kind = opts.rootRank, "gather_single"
        takes = self._blocks([self._cut(kind, output)]) if self._rank == root else {}
        return self._begin(
            kind, terms={"root": self._world(root)}, gives={root: [input]}, takes=takes
        )

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:  # type: ignore[override]
        root = opts.rootRank
        gives = self._blocks(inputs) if self._rank == root else {}
        return self._begin(
            "scatter", terms={"root": self._world(root)}, gives=gives, takes={root: list(outputs)}
        )

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        self._check_ranks("reduce_scatter", inputs)
        op = _operator(opts)
        return self._begin(
            "reduce_scatter",
            terms=_terms(op),
            gives=self._blocks(inputs),
            reduces=list(outputs),
            op=op,
        )

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> dist.Work:
        kind, op = "reduce_scatter_tensor", _operator(opts)
        return self._begin(
            kind,
            terms=_terms(op),
            gives=self._blocks([self._cut(kind, tensor) for tensor in inputs]),
            reduces=list(outputs),
            op=op,
        )

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        self._check_ranks("all_to_all", [inputs, outputs])
        return self._begin(
            "all_to_all", gives=self._blocks([inputs]), takes=self._blocks([outputs])
        )

    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> dist.Work:
        kind = "all_to_all_single"
        return self._begin(
            kind,
            gives=self._blocks([self._cut(kind, input, input_splits, "input")]),
            takes=self._blocks([self._cut(kind, output, output_splits, "output")]),
        )

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._begin("barrier")

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self._begin("monitored_barrier").wait()

    def send(self, tensors: Any, peer: int, tag: int = 0) -> dist.Work:
        return self._begin("send", gives={peer: list(tensors)}, peer=peer, tag=tag)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> dist.Work:
        return self._begin("recv", takes={peer: list(tensors)}, peer=peer, tag=tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        return self._begin("recv", takes={-1: list(tensors)}, peer=-1, tag=tag)

    def _world(self, rank: int) -> int:
        if not 0 <= rank < self.size():
            raise ValueError(f"{self.group} has no rank {rank} of its own")
        return self.group.ranks[rank]

    def _check_ranks(self, kind: str, lists: Sequence[Tensors]) -> None:
        for of_ranks in lists:
            if len(of_ranks) != self.size():
                raise ValueError(
                    f"{kind}: a list has {len(of_ranks)} tensors for {self.size()} ranks"
                )

    def _cut(
        self, kind: str, tensor: torch.Tensor, splits: Any = None, name: str = "tensor"
    ) -> list[torch.Tensor]:
        """Cut a tensor into blocks, with equally many elements or as many rows as `splits`."""
        size = self.size()
        if not tensor.is_contiguous():
            raise ValueError(f"{kind}: {name} must be contiguous")
        if splits:
            if len(splits) != size or sum(splits) != len(tensor):
                raise ValueError(
                    f"{kind}: {name} has {len(tensor)} rows on rank {self._world(self._rank)}, its "
                    f"splits {list(splits)} sum to {sum(splits)}"
                )
            return list(tensor.split(list(splits)))
        rows = len(tensor) if kind == "all_to_all_single" else tensor.numel()
        if rows % size:
            self._runtime.refute(self._remainder(kind, rows))
        return list(tensor.view(-1).chunk(size)) if tensor.numel() else [tensor.view(-1)] * size

    def _remainder(self, kind: str, rows: int) -> Finding:
        size, site = self.size(), site_of_caller()
        return Finding(
            "OWN",
            f"{kind} shares out {rows} rows to {size} ranks: {rows % size} of them belong to "
            "nobody",
            where=str(site),
            ranks=(self._world(self._rank),),
            picture=f"{site}  {kind} of {rows} rows, {rows // size} for each rank",
            advice="Pad to a multiple of the ranks, or give the sizes of uneven shares.",
            kind="remainder",
            details={"rows": rows, "ranks": size},
        )


def _check(tensors: Tensors, kind: str) -> None:
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise NotUsable(
                f"simulate: {kind} has a tensor of layout {tensor.layout} on {tensor.device}; "
                "dense ones on the CPU can be simulated, or of CUDA with --cuda-as-cpu"
            )


def _operator(opts: Any) -> Any:
    if opts is None:
        return ReduceOp.SUM
    return getattr(opts, "reduceOp", opts)


def _terms(op: Any) -> dict[str, object]:
    return {"op": name_of(op)}
