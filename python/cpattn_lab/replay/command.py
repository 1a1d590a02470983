# SPDX-License-Identifier: Apache-2.0
"""Options of `cpattn replay` as requests and settings, and the memory that these need."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cpattn.scheduling.request import Request

from ..traffic.trace import TRACE_BLOCK_TOKENS, generate_trace, read_trace, scale_lengths
from .dense.model import DenseConfig
from .driver import fast_dtype
from .dsa.model import DsaConfig
from .footprint import footprint, memory
from .model import DecoderConfig
from .records import ReplayOptions

CHECK_ROWS, DECODE_TOKENS = 16, 8
MAX_THREADS = 1024  # limit of all processes together, or four per CPU if that is more
_START_SECONDS = 4.0  # CPU time until a process has imported torch and made its part of the model
_PAGES = [2**i for i in range(10)]


def read_requests(trace: Path | None, num_requests: int, seed: int) -> list[Request]:
    """Return the first requests of a trace, or generated ones."""
    if trace:
        return read_trace(trace, limit=num_requests)
    return generate_trace(num_requests, seed=seed)


def settings_of(
    *,
    model: str,
    dtype: str,
    seed: int,
    check: bool,
    check_rows: int | None,
    disaggregate: bool,
    decode_tokens: int | None,
    decode_ranks: int | None,
    weights: Sequence[int] | None,
    **options: Any,
) -> ReplayOptions:
    """Return the settings of options; a ValueError names options that exclude each other."""
    if decode_tokens and not disaggregate:
        raise ValueError(f"--decode-tokens {decode_tokens} needs --disaggregate")
    if decode_ranks and not disaggregate:
        raise ValueError(f"--decode-ranks {decode_ranks} needs --disaggregate")
    if check_rows and not check:
        raise ValueError(f"--check-rows {check_rows} needs --check, got --no-check")
    if weights is not None:
        size = options["cp_size"]
        if len(weights) != size or min(weights) < 1 or options["strategy"] == "interleave":
            raise ValueError(
                f"--weights must be {size} numbers above 0, one for each rank of --cp-size, and go "
                f"with --strategy zigzag or contiguous, got {','.join(map(str, weights))}"
            )
    config = _model(model, dtype, seed, options)
    _check_pages(options["page_size"], options["scale_lengths"], options["pool_tokens"])
    if options["pp_size"] > config.num_layers:
        raise ValueError(
            f"--pp-size must be at most the number of layers, {config.num_layers}, "
            f"got {options['pp_size']}; see --layers"
        )
    settings = ReplayOptions(
        model=config,
        check_rows=(check_rows or CHECK_ROWS) if check else 0,
        decode_tokens=(decode_tokens or DECODE_TOKENS) if disaggregate else 0,
        decode_ranks=decode_ranks or 1,
        weights=None if weights is None else tuple(weights),
        **options,
    )
    _check_processes(settings)
    return settings


def _model(model: str, dtype: str, seed: int, options: dict[str, Any]) -> DecoderConfig:
    """Return the model of the options, and remove its options."""
    kinds: dict[str, Any] = {"dense": DenseConfig, "dsa": DsaConfig}
    fields = {kind: {f.name for f in dataclasses.fields(kinds[kind])} for kind in kinds}
    sizes = {}
    for name in options.keys() - {field.name for field in dataclasses.fields(ReplayOptions)}:
        value = options.pop(name)
        if value is None:
            continue
        if name not in fields[model]:
            (other,) = kinds.keys() - {model}
            option = name.removeprefix("num_").replace("_", "-")
            raise ValueError(f"--{option} is an option of --model {other}, not of --model {model}")
        sizes[name] = value
    if sizes.get("kv_dtype") == "auto":
        del sizes["kv_dtype"]  # the pools have the model's dtype
    if model == "dsa":
        if sizes.get("kv_dtype", "fp8") not in ("bf16", "fp8"):
            raise ValueError(
                f"--kv-dtype must be auto, bf16 or fp8 with --model dsa, got {sizes['kv_dtype']}"
            )
        if sizes.get("num_layers", 1) != 1:
            raise ValueError(f"--layers must be 1 with --model dsa, got {sizes['num_layers']}")
        if dtype == "float16":
            raise ValueError("--dtype must be bfloat16 or float32 with --model dsa, got float16")
        if sizes.get("kv_dtype") == "fp8":
            if dtype == "float32":
                raise ValueError("--dtype must be bfloat16 with --kv-dtype fp8, got float32")
            dtype = "bfloat16"
        elif "prefill_impl" in sizes:
            raise ValueError("--prefill-impl says how FP8 rows are read: it needs --kv-dtype fp8")
    return kinds[model](dtype=fast_dtype() if dtype == "auto" else dtype, seed=seed, **sizes)


def _check_pages(page_size: int, scale_lengths: int, pool_tokens: int) -> None:
    if TRACE_BLOCK_TOKENS % scale_lengths:
        raise ValueError(
            f"--scale-lengths must be a power of two from 1 to {TRACE_BLOCK_TOKENS}, "
            f"got {scale_lengths}"
        )
    block = TRACE_BLOCK_TOKENS // scale_lengths
    if block % page_size:
        fitting = ", ".join(str(size) for size in _PAGES if block % size == 0)
        raise ValueError(
            f"--page-size must divide {TRACE_BLOCK_TOKENS} / --scale-lengths {scale_lengths} = "
            f"{block}, got {page_size}; one of {fitting} does"
        )
    if pool_tokens < page_size:
        raise ValueError(
            f"--pool-tokens must be at least a page (--page-size {page_size}), got {pool_tokens}"
        )


def _check_processes(options: ReplayOptions) -> None:
    """Raise ValueError for too many threads, with which OpenMP would end the process."""
    processes, each = options.num_processes, max(options.num_threads, 1)
    most = max(MAX_THREADS, 4 * num_cpus())
    if processes > most:
        decoding = processes - options.num_ranks
        names = "--cp-size times --pp-size"
        raise ValueError(
            f"{names}{' and --decode-ranks' * bool(decoding)} must be at most {most} processes, "
            f"got {options.cp_size} x {options.pp_size}{f' and {decoding}' * bool(decoding)}"
        )
    if processes * each > most:
        raise ValueError(
            f"--threads must be at most {most // processes} for {processes} "
            f"process{'es' * (processes > 1)}, got {each}; 0 shares out the CPUs"
        )


def check_room(requests: Sequence[Request], options: ReplayOptions) -> str | None:
    """Raise ValueError if a prompt does not fit into the pool, or the pools into the machine.

    Returns
    -------
    str or None
        Warning before the processes start; None if they fit.
    """
    lengths = [r.input_length for r in scale_lengths(requests, options.scale_lengths)]
    _check_longest(max(lengths), options)
    need = footprint(options, min(options.token_budget, sum(lengths)))
    total, free = memory()
    cpus, processes = num_cpus(), options.num_processes
    if total and need.arrays > total:
        pools = "pools" if options.is_sharded else "replicated pools"
        raise ValueError(
            f"{pools} and weights of {processes} processes take {_gib(need.arrays)}, this machine "
            f"has {_gib(total)}: choose a smaller --pool-tokens, model or --cp-size"
        )
    memory_text = f"about {_gib(need.total)} of memory"
    memory_text += f", of which {_gib(free)} are free" if free else ""
    if processes > 2 * cpus:
        seconds = _START_SECONDS * processes / cpus
        start = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"
        return (
            f"warning: {processes} processes take turns on {cpus} CPU{'s' * (cpus > 1)}: expect "
            f"{start} until all have started, slow batches, and {memory_text}"
        )
    if free and need.total > free:
        return f"warning: {processes} processes will take {memory_text}"
    return None


def check_sharded(options: ReplayOptions) -> None:
    """Raise ValueError if there is nothing to compare with replicated pools."""
    if not options.is_sharded:
        raise ValueError("--against-replicated needs --placement, got replicated")
    if not options.check_rows:
        raise ValueError("--against-replicated compares rows: it needs --check, got --no-check")


def _check_longest(num_tokens: int, options: ReplayOptions) -> None:
    """Check that the longest prompt fits into the pool; hash blocks have their own pages."""
    page_size, block = options.page_size, options.block_tokens
    blocks, rest = divmod(num_tokens, block)
    pages = blocks * (block // page_size) + -(-rest // page_size)
    if pages > options.num_pages:
        least = -(-pages // options.page_shards) * options.page_shards * page_size
        raise ValueError(
            f"--pool-tokens must hold the longest prompt, {num_tokens} tokens with --scale-lengths "
            f"{options.scale_lengths}, so be at least {least}, got "
            f"{options.pool_tokens}"
        )


def num_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def _gib(number: int) -> str:
    return f"{number / 2**30:,.1f} GiB"
