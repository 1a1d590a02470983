# SPDX-License-Identifier: Apache-2.0
"""Request traces in the format of Mooncake's: lengths and prefix hashes, no text."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cpattn._limits import check_integer
from cpattn.scheduling.request import Request, checked_requests

TRACE_BLOCK_TOKENS = 512  # input tokens per entry of `hash_ids`
_FIELDS = ("timestamp", "input_length", "output_length")


def read_trace(path: str | Path, *, limit: int | None = None) -> list[Request]:
    """Read the first `limit` requests (default: all) of a ``.jsonl`` or ``.jsonl.gz`` file.

    Parameters
    ----------
    path : str or Path
        Lines of JSON with the fields of `Request`, as Mooncake publishes them.
    limit : int, optional
        Number of requests to read, at least 1.

    Returns
    -------
    list of Request
        Requests in the order of the file.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If a line is no request (names file, line and field), or the file has none.

    Examples
    --------
    >>> import os, tempfile
    >>> line = b'{"timestamp": 5, "input_length": 9, "output_length": 2, "hash_ids": [4]}'
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "trace.jsonl")
    ...     _ = path.write_bytes(line)
    ...     read_trace(path)
    [Request(timestamp=5, input_length=9, output_length=2, hash_ids=(4,))]
    """
    if limit is not None:
        check_integer("read_trace", "limit", limit)
    opener = gzip.open if str(path).endswith(".gz") else open
    requests: list[Request] = []
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if limit is not None and len(requests) == limit:
                    break
                if line.strip():
                    requests.append(_parse(line, f"read_trace: {path}: line {number}"))
    except (gzip.BadGzipFile, zlib.error, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"read_trace: {path}: {error}") from None
    if not requests:
        raise ValueError(f"read_trace: {path}: must hold a request, got none")
    return requests


def _parse(line: str, where: str) -> Request:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # Python limits valid JSON, too
        raise ValueError(f"{where}: not JSON ({getattr(error, 'msg', error)})") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected an object, got {line.strip()[:40]}")
    for name in _FIELDS:
        _check_integer(record.get(name), 1 if name == "input_length" else 0, f"{where}: {name}")
    ids = record.get("hash_ids")
    if not isinstance(ids, list):
        raise ValueError(f"{where}: hash_ids must be a list, got {ids!r}")
    for i, value in enumerate(ids):
        _check_integer(value, 0, f"{where}: hash_ids[{i}]")
    blocks = -(-record["input_length"] // TRACE_BLOCK_TOKENS)
    if len(ids) != blocks:
        raise ValueError(
            f"{where}: input_length {record['input_length']} has {blocks} blocks of "
            f"{TRACE_BLOCK_TOKENS} tokens, hash_ids has {len(ids)}"
        )
    return Request(**{name: record[name] for name in _FIELDS}, hash_ids=tuple(ids))


def _check_integer(value: Any, least: int, name: str) -> None:
    if type(value) is not int or not least <= value < 2**63:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")


def generate_trace(num_requests: int, *, seed: int = 0) -> list[Request]:
    """Generate chat traffic that resembles an hour of Mooncake's conversation trace.

    Every prompt starts with the same system block. Two of three requests open a conversation with a
    log-normal length: median about 6,000 tokens, a tenth above 28,000, none above 123,000. The
    others continue a conversation: they repeat its full blocks, followed by some hundreds of new
    tokens. A few requests repeat a whole prompt. Turns follow each other faster than people type,
    so a short trace has the prefix hits of a long one: about a third of the input tokens. Equal
    arguments give equal traces.

    Parameters
    ----------
    num_requests : int
        At least 1.
    seed : int
        At least 0.

    Returns
    -------
    list of Request

    Raises
    ------
    TypeError, ValueError
        If a number or seed is no integer, or too small.

    Examples
    --------
    >>> requests = generate_trace(64, seed=1)
    >>> len(requests), all(request.hash_ids[0] == 0 for request in requests)
    (64, True)
    >>> requests == generate_trace(64, seed=1)
    True
    """
    check_integer("generate_trace", "num_requests", num_requests)
    check_integer("generate_trace", "seed", seed, 0)
    rng = np.random.default_rng(seed)
    next_id = 1  # 0 is the system block
    conversations: list[Request] = []
    requests = []
    for i in range(num_requests):
        output = int(np.clip(rng.lognormal(5.9, 0.8), 1, 2000))
        kind = rng.random() if conversations else 1.0
        # Recent conversations are likely to continue.
        recent = -1 - min(int(rng.exponential(8.0)), len(conversations) - 1)
        if kind < 0.03:
            length, shared = conversations[recent].input_length, conversations[recent].hash_ids
        elif kind < 0.36:
            last = conversations.pop(recent)
            length = last.input_length + last.output_length + int(rng.lognormal(4.6, 1.6))
            shared = last.hash_ids[: last.input_length // TRACE_BLOCK_TOKENS]
        else:
            length, shared = 890 + int(rng.lognormal(8.45, 1.4)), (0,)
        length = min(length, 123_000)
        blocks = -(-length // TRACE_BLOCK_TOKENS)
        shared = shared[:blocks]
        fresh = range(next_id, next_id + blocks - len(shared))
        next_id += len(fresh)
        request = Request(3000 * (i // 9), length, output, (*shared, *fresh))
        conversations.append(request)
        requests.append(request)
    return requests


def scale_lengths(requests: Sequence[Request], divisor: int) -> list[Request]:
    """Divide the lengths of requests by `divisor`; hash blocks then have 512/divisor tokens.

    `divisor` must divide 512, so that block borders stay block borders: the number of blocks, the
    sharing and (nearly) the hit rate of the trace do not change.

    Parameters
    ----------
    requests : sequence of Request
    divisor : int
        A divisor of 512.

    Returns
    -------
    list of Request
        Requests with lengths rounded up and all else unchanged.

    Raises
    ------
    TypeError, ValueError
        If `divisor` is no integer or does not divide 512, or `requests` has other elements.

    Examples
    --------
    >>> scale_lengths([Request(0, 1000, 30, (0, 1))], 16)
    [Request(timestamp=0, input_length=63, output_length=2, hash_ids=(0, 1))]
    """
    check_integer("scale_lengths", "divisor", divisor)
    if TRACE_BLOCK_TOKENS % divisor:
        raise ValueError(f"scale_lengths: divisor must divide {TRACE_BLOCK_TOKENS}, got {divisor}")
    return [
        replace(
            request,
            input_length=-(-request.input_length // divisor),
            output_length=-(-request.output_length // divisor),
        )
        for request in checked_requests("scale_lengths", requests)
    ]


def block_tokens_of(
    request: Request, begin: int, end: int, *, block_tokens: int, vocab_size: int, seed: int
) -> npt.NDArray[np.int64]:
    """Make the token ids of positions begin ... end - 1 of a prompt.

    A token is a hash of its block's id, its place in the block and `seed`: equal blocks give equal
    tokens, in every process.

    Parameters
    ----------
    request : Request
    begin, end : int
        Positions within the prompt.
    block_tokens : int
        Tokens per hash block: 512, or 512/divisor after `scale_lengths`.
    vocab_size : int
        Upper bound of the ids, exclusive.
    seed : int
        Seed of the tokens.

    Returns
    -------
    array [end - begin], int64

    Raises
    ------
    IndexError
        If positions are beyond the blocks of the prompt.

    Examples
    --------
    >>> first, second = Request(0, 4, 1, (3, 8)), Request(0, 4, 1, (3, 9))
    >>> options = dict(block_tokens=2, vocab_size=100, seed=0)
    >>> a, b = (block_tokens_of(request, 0, 4, **options) for request in (first, second))
    >>> (a == b).tolist()     # the first block is the same
    [True, True, False, False]
    """
    position = np.arange(begin, end, dtype=np.uint64)
    ids = np.asarray(request.hash_ids, dtype=np.uint64)[position // np.uint64(block_tokens)]
    state = ids * np.uint64(TRACE_BLOCK_TOKENS) + position % np.uint64(block_tokens)
    for salt in (seed % 2**64, 0):
        state = _mix(state + np.uint64(salt))
    tokens: npt.NDArray[np.int64] = (state % np.uint64(vocab_size)).astype(np.int64)
    return tokens


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the output function of SplitMix64, a bijection that mixes every input bit into all."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    mixed: npt.NDArray[np.uint64] = state ^ (state >> np.uint64(31))
    return mixed


def unbounded_hits(requests: Sequence[Request], block_tokens: int) -> Iterator[int]:
    """Count the tokens of each prompt that an unbounded prefix cache would have on its arrival.

    Parameters
    ----------
    requests : sequence of Request
    block_tokens : int
        Tokens per hash block: 512, or 512/divisor after `scale_lengths`.

    Returns
    -------
    iterator of int
        A number for each request, in order.

    Raises
    ------
    TypeError
        If `requests` has other elements; raised when the first number is asked for.

    Examples
    --------
    >>> requests = [Request(0, 700, 1, (0, 1)), Request(1, 1300, 1, (0, 1, 2))]
    >>> list(unbounded_hits(requests, 512))
    [0, 1024]
    """
    seen: set[tuple[int, ...]] = set()
    for request in checked_requests("unbounded_hits", requests):
        ids = request.hash_ids
        hit = 0
        while hit < len(ids) and ids[: hit + 1] in seen:
            hit += 1
        seen.update(ids[: n + 1] for n in range(len(ids)))
        yield min(hit * block_tokens, request.input_length)
