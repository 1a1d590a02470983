# SPDX-License-Identifier: Apache-2.0
"""Memory that a replay will need, and available memory."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from .dense.model import DenseConfig
from .disaggregation.driver import decode_pages
from .dsa.model import DsaConfig
from .model import DecoderConfig, DecoderLayer
from .records import ReplayOptions

_PROCESS_BYTES = 160 << 20  # a process that has imported torch, without shared memory


@dataclass(frozen=True)
class Footprint:
    """Bytes of all processes together."""

    arrays: int  # pools and weights, allocated at the start
    total: int  # arrays, the processes themselves, and the memory of a batch


def footprint(options: ReplayOptions, batch_tokens: int) -> Footprint:
    """Estimate the memory from the sizes of the model; low rather than high.

    batch_tokens : int
        New tokens of the largest batch.
    """
    model = options.model
    weights = _num_weights(model)
    decode_ranks = options.decode_ranks if options.decode_tokens else 0
    copies = options.cp_size + decode_ranks  # stages split the layers
    arrays = weights * (copies * model.torch_dtype.itemsize + 4 * bool(options.check_rows))
    slots = options.rank_pages * options.page_size * options.cp_size
    if options.decode_tokens:
        slots += decode_pages(options) * options.page_size
    arrays += slots * token_bytes(model) * model.num_layers
    width = 2 * model.intermediate_size + model.num_heads * _head_width(model)
    batch = batch_tokens * width * 4
    return Footprint(arrays, arrays + batch + _PROCESS_BYTES * (options.num_processes + 1))


def token_bytes(model: DecoderConfig) -> int:
    """Return the bytes that a pool keeps of a token in one layer."""
    if isinstance(model, DsaConfig):
        if model.kv_dtype == "fp8":
            return 656 + model.index_head_dim + 4
        return (model.latent_dim + model.index_head_dim) * model.torch_dtype.itemsize
    assert isinstance(model, DenseConfig)
    head = model.head_dim * getattr(torch, model.pool_dtype).itemsize
    head += getattr(torch, model.scale_dtype).itemsize if model.scale_dtype else 0
    return 2 * model.num_kv_heads * int(head)


def _head_width(model: DecoderConfig) -> int:
    if isinstance(model, DsaConfig):
        return 2 * model.latent_dim
    assert isinstance(model, DenseConfig)
    return 2 * model.head_dim


def _num_weights(model: DecoderConfig) -> int:
    with torch.device("meta"):  # shapes only
        layer = DecoderLayer(model, 0)
    per_layer = sum(weight.numel() for weight in layer.parameters())
    return per_layer * model.num_layers + model.vocab_size * model.hidden_size


def memory() -> tuple[int, int]:
    """Return total and free bytes of this machine or container; 0: unknown."""
    sizes = {}
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, size = line.partition(":")
            sizes[name] = int(size.split()[0]) * 1024
    total, free = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
    for folder in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")):
        with suppress(OSError, ValueError):
            if folder.name == "memory":
                names = "memory.limit_in_bytes", "memory.usage_in_bytes"
            else:
                names = "memory.max", "memory.current"
            limit, used = (int((folder / name).read_text(encoding="ascii")) for name in names)
            total, free = min(total, limit), min(free, max(limit - used, 0))
    return total, free
