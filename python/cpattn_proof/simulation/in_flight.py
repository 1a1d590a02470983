# SPDX-License-Identifier: Apache-2.0
"""Tensors between the start of a call and its wait, and accesses to them meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch._dynamo  # otherwise modes import it at their first operator, in the rank's time
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ..findings import Finding
from .calls import Call, Site, site_of_caller
from .fabric import results_of

_POISON = 0x5A  # byte for integers; floats get NaN
PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
# Operators that only look at a tensor's place, or wait for it themselves.
_HARMLESS_NAMESPACES = ("_c10d_functional", "c10d", "_c10d_functional_autograd", "profiler", "prim")


def start(call: Call) -> None:
    """Copy the given tensors, and fill the outputs with poison."""
    copies = {id(block): _copy(block) for block in call.inputs}
    call.kept = [(block, copies[id(block)]) for block in call.inputs]
    for rank, blocks in call.gives.items():
        call.given[rank] = [copies[id(block)] for block in blocks]
    for output in call.outputs:
        _poison(output)


def note_writers(call: Call, begun: Iterable[Call]) -> None:
    """Record, for a call and those in flight, which fills memory of the other."""
    for other in begun:
        if _any_overlap(call.outputs, [*other.inputs, *other.outputs]):
            other.written_by = other.written_by or call
        if _any_overlap(other.outputs, call.inputs):
            call.written_by = call.written_by or other


def _any_overlap(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return any(surely_overlap(one, other) for one in tensors for other in others)


def faults_of(call: Call) -> Iterator[Finding]:
    """Find changes between the start of a call and its wait."""
    outputs = call.outputs
    for block, copy in call.kept:
        if not any(_overlap(block, output) for output in outputs) and not _same(block, copy):
            yield _changed(call, "given", "changed-in-flight")
            return
    if not all(map(_is_poisoned, outputs)):
        yield _changed(call, "to be filled", "written-in-flight")


def deliver(call: Call) -> None:
    """Fill the outputs with the tensors that the other ranks gave."""
    for output, value in results_of(call):
        with torch.inference_mode(output.is_inference()), torch.no_grad():
            output.detach().copy_(value.view_as(output))


class Watch(TorchDispatchMode):
    """Finds operators of one rank that read or change a tensor in flight."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []  # begun and not awaited
        self.findings: list[Finding] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.calls and not _only_looks(func):
            self._look_at(func, args, kwargs)
        return func(*args, **kwargs)

    def _look_at(self, func: Any, args: Any, kwargs: Any) -> None:
        for argument, values in _by_argument(func, args, kwargs):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_iter(values):
                if type(tensor) in PLAIN and tensor.numel():
                    self._look_at_tensor(tensor, writes)

    def _look_at_tensor(self, tensor: torch.Tensor, writes: bool) -> None:
        for call in self.calls:
            touched = call.outputs + (call.inputs if writes else [])
            if any(surely_overlap(tensor, other) for other in touched):
                read = any(surely_overlap(tensor, other) for other in call.outputs)
                self._note(call, site_of_caller(), writes, read)

    def _note(self, call: Call, site: Site, writes: bool, is_output: bool) -> None:
        verb = "changes" if writes else "reads"
        kind = "changed-in-flight" if writes else "read-before-wait"
        part = "that is to be filled" if is_output else "that is given away"
        finding = Finding(
            "SEQ",
            f"rank {call.world_rank} {verb} a tensor {part} by {call} before it waits for that",
            where=str(site),
            ranks=(call.world_rank,),
            picture=f"{call.site}  {call} begins\n{site}  {verb} its tensor",
            advice="Wait for the call first: work.wait().",
            kind=kind,
        )
        if finding not in self.findings:
            self.findings.append(finding)


def _changed(call: Call, which: str, kind: str) -> Finding:
    begins, writer = f"{call.site}  {call} begins", call.written_by
    by = f", which {writer.kind} fills," if writer else ""
    return Finding(
        "SEQ",
        f"a tensor {which} by {call} on rank {call.world_rank}{by} changed before its wait",
        where=str(call.site),
        ranks=(call.world_rank,),
        picture=f"{begins}\n{writer.site}  {writer} fills its memory" if writer else begins,
        advice="Leave tensors alone until work.wait() has returned, or give a copy.",
        kind=kind,
    )


def _only_looks(func: Any) -> bool:
    """Tell whether an operator touches no values, such as views and sizes."""
    if func.namespace in _HARMLESS_NAMESPACES:
        return True
    return func.is_view or func._opname in ("empty_like", "alias", "detach", "_to_copy_meta")


def _by_argument(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    arguments = func._schema.arguments
    yield from zip(arguments, args, strict=False)
    for argument in arguments:
        if argument.name in kwargs:
            yield argument, kwargs[argument.name]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a dense tensor in element order, for any strides."""
    values = tensor.detach().resolve_conj().resolve_neg()
    return values.contiguous().view(-1).view(torch.uint8)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _same(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    return torch.equal(bytes_of(tensor), bytes_of(copy))


def _poison(tensor: torch.Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.detach().fill_(_poison_of(tensor.dtype))


def _poison_of(dtype: torch.dtype) -> float | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else _POISON


def _is_poisoned(tensor: torch.Tensor) -> bool:
    expected = torch.full(tensor.shape, _poison_of(tensor.dtype), dtype=tensor.dtype)
    return _same(tensor, expected)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte and past the last byte."""
    if not tensor.numel():
        return 0, 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors may share bytes."""
    begin, end = _span(one)
    other_begin, other_end = _span(other)
    return begin < other_end and other_begin < end


def surely_overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors share bytes; adjacent columns do not."""
    dense = is_dense(one) and is_dense(other)
    return dense and _overlap(one, other)


def is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor fills the memory between its first and last element."""
    begin, end = _span(tensor)
    return end - begin == tensor.numel() * tensor.element_size()
