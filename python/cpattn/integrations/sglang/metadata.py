# SPDX-License-Identifier: Apache-2.0
"""Context-parallel metadata as sglang's own objects, computed by one call of the core.

sglang makes a dozen small tensors one by one. Here all are parts of one block: one allocation and,
for a device, one copy. They share its storage but no element, so writing into one, which sglang
does not, would not change the others.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from ... import _core
from ...context_parallel.metadata import build_cp_metadata

# In the order of the core's packed arrays.
_TENSORS = tuple(
    f"{family}_{half}_tensor"
    for family in ("kv_len", "actual_seq_q", "cu_seqlens_q", "cu_seqlens_kv")
    for half in ("prev", "next", "combined")
)
_VALUES = (
    "split_list", "zigzag_index", "cp_reverse_index", "reverse_split_len", "per_rank_actual_token",
    "max_rank_len", "total_q_prev_tokens", "total_q_next_tokens", "max_seqlen_q_prev",
    "max_seqlen_q_next", "max_seqlen_q_combined", "kv_len_prev_list", "kv_len_next_list",
    "actual_seq_q_prev_list", "actual_seq_q_next_list", "total_seq_lens", "bs",
)  # fmt: skip
_values_of = attrgetter(*_VALUES)
_DEVICE_ALIGNMENT = 16  # elements: 64 bytes. Triton compiles anew for pointers below 16 bytes.


class _Engine(NamedTuple):
    zigzag: type[Any]
    interleave: type[Any]
    get_device: Any


@functools.cache
def _engine() -> _Engine:
    def module(name: str) -> Any:
        return importlib.import_module(f"sglang.srt.{name}")

    return _Engine(
        module("layers.cp.zigzag").ZigzagContextParallelMetadata,
        module("layers.cp.interleave").InterleaveContextParallelMetadata,
        module("runtime_context").get_device,
    )


def build_metadata(
    self: Any,
    num_tokens: int,
    seqs_len: Sequence[int] | None,
    extend_seqs_len: Sequence[int] | None = None,
) -> Any:
    """Plan this rank's share of a batch, in place of the method of sglang's strategies.

    Parameters
    ----------
    self : ZigzagCPStrategy or InterleaveCPStrategy
        Read are ``name``, ``cp_size`` and ``cp_rank``.
    num_tokens : int
        Tokens with padding, which counts as new tokens of the last sequence. Fewer than the sum
        of the lengths mean no padding.
    seqs_len : int, shape [bs], optional
        Cached prefix plus new tokens; of another length, or below `extend_seqs_len`: no prefix.
    extend_seqs_len : int, shape [bs], optional
        New tokens; `seqs_len` if not given, or else ``[num_tokens]``.

    Returns
    -------
    ZigzagContextParallelMetadata or InterleaveContextParallelMetadata
        All fields as sglang sets them: lists of int, int32 tensors on sglang's device.

    Raises
    ------
    ValueError
        Lengths are negative, there are none, or a value does not fit into int32.

    Examples
    --------
    >>> build_metadata(strategy, 24, [32], [24])  # doctest: +SKIP
    """
    if self.name == "interleave":
        if extend_seqs_len is not None:
            seqs_len = None
        plan = _plan(self, num_tokens, seqs_len, extend_seqs_len)
        return _engine().interleave(
            per_rank_actual_token=plan.per_rank_actual_token,
            max_rank_len=plan.max_rank_len,
            total_seq_lens=plan.total_seq_lens,
            bs=plan.bs,
        )
    plan = _plan(self, num_tokens, seqs_len, extend_seqs_len)
    metadata = _engine().zigzag()
    fields = metadata.__dict__  # faster than 29 keyword arguments
    fields.update(zip(_VALUES, _values_of(plan), strict=True))
    fields.update(zip(_TENSORS, _tensors(plan), strict=True))
    return metadata


def _plan(
    strategy: Any, num_tokens: Any, seqs_len: Any, extend_seqs_len: Any
) -> _core.ContextParallelMetadata:
    make = functools.partial(
        build_cp_metadata, cp_rank=strategy.cp_rank, cp_size=strategy.cp_size,
        strategy=strategy.name, compat=True,
    )  # fmt: skip
    try:
        return make(extend_seqs_len, seqs_len, num_tokens=num_tokens)
    except (TypeError, ValueError):  # what only sglang takes, or nobody
        extend, seqs, tokens = _read(num_tokens, seqs_len, extend_seqs_len)
        return make(extend, seqs, num_tokens=tokens)


def _read(
    num_tokens: Any, seqs_len: Any, extend_seqs_len: Any
) -> tuple[list[int], list[int] | None, int]:
    """Arguments as sglang reads them: anything that ``int`` takes, and too few tokens."""
    seqs = None if seqs_len is None else [int(n) for n in seqs_len]
    extend = (seqs or [num_tokens]) if extend_seqs_len is None else extend_seqs_len
    extend = [int(n) for n in extend]
    return extend, seqs, max(int(num_tokens), sum(extend))


def _tensors(plan: _core.ContextParallelMetadata) -> Sequence[torch.Tensor]:
    device = _device()
    is_cpu = device.type == "cpu"
    packed, sizes = plan._packed_tensors(1 if is_cpu else _DEVICE_ALIGNMENT)
    block = torch.from_numpy(packed)
    if not is_cpu:
        block = block.to(device)
    # "Unsafe" for gradients, which integers do not have, and faster than a split into views.
    parts = torch.unsafe_split_with_sizes(block, sizes)
    return parts if is_cpu else parts[::2]  # without the gaps


def _device() -> torch.device:
    """Return the device on which sglang's own function puts the tensors."""
    try:
        return torch.device(_engine().get_device().device)
    except Exception:  # no configuration published, as in unit tests
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
