# SPDX-License-Identifier: Apache-2.0
"""Requirements of backends on tensors: dense memory, and no overlap of inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..findings import Finding
from .calls import Blocks, Call
from .in_flight import is_dense, surely_overlap

# Calls for which gloo copies tensors; for others it uses memory as is, like NCCL for messages.
_ANY_STRIDES = ("all_gather", "all_gather_coalesced", "gather")
# Calls that form sums in place of their inputs.
_IN_PLACE = ("all_reduce", "all_reduce_coalesced", "reduce")


def fault_of(call: Call) -> Finding | None:
    """Find why a backend would refuse the tensors of a call, or compute other values with them."""
    if call.kind not in _ANY_STRIDES:
        for tensor in (*call.inputs, *call.outputs):
            if not tensor.is_contiguous() and not is_dense(tensor):
                return _with_gaps(call, tensor)
    return next(_given_and_filled(call), None)


def take_as_it_lies(call: Call) -> None:
    """Make the call see transposed tensors in memory order, as backends do."""
    if call.kind not in _ANY_STRIDES and not all(
        tensor.is_contiguous() for tensor in (*call.inputs, *call.outputs)
    ):
        call.gives, call.takes = _rows(call.gives), _rows(call.takes)
        call.reduces = [_row(tensor) for tensor in call.reduces]
        call.forget_lists()


def _rows(blocks: Blocks) -> Blocks:
    return {rank: [_row(tensor) for tensor in block] for rank, block in blocks.items()}


def _row(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_contiguous() else tensor.detach().as_strided((tensor.numel(),), (1,))


def _with_gaps(call: Call, tensor: torch.Tensor) -> Finding:
    return Finding(
        "SEQ",
        f"{call} has on rank {call.world_rank} a tensor of sizes {list(tensor.shape)} and strides "
        f"{list(tensor.stride())}, whose elements do not fill its memory: backends refuse it, or "
        "take what lies between them",
        where=str(call.site),
        ranks=(call.world_rank,),
        picture=f"{call.site}  {call}",
        advice="Give x.contiguous(), and copy back what comes.",
        kind="not-contiguous",
    )


def _given_and_filled(call: Call) -> Iterator[Finding]:
    """Return memory that a call both fills and gives, except a rank's own block to itself."""
    if call.kind in _IN_PLACE or not _share_storage(call):
        return
    own = [_place(block) for block in call.gives.get(call.rank, [])]
    filled = [(source, block) for source, blocks in call.takes.items() for block in blocks]
    filled += [(call.rank, block) for block in call.reduces]
    for source, block in filled:
        for given in call.inputs:
            is_own = source == call.rank and _place(given) == _place(block) in own
            if not is_own and surely_overlap(given, block):
                yield Finding(
                    "SEQ",
                    f"{call} fills memory on rank {call.world_rank} that it also gives away: what "
                    "others get depends on which comes first",
                    where=str(call.site),
                    ranks=(call.world_rank,),
                    picture=f"{call.site}  {call}",
                    advice="Give another tensor for what comes.",
                    kind="given-and-filled",
                )
                return


def _share_storage(call: Call) -> bool:
    storages = {tensor.untyped_storage().data_ptr() for tensor in call.inputs if tensor.numel()}
    return any(tensor.untyped_storage().data_ptr() in storages for tensor in call.outputs)


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()
