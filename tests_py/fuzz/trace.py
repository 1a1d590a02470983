# SPDX-License-Identifier: Apache-2.0
"""Target of the fuzzer: files of requests with any bytes, or nearly correct lines of JSON."""

import dataclasses
import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

from cpattn_lab.traffic.trace import TRACE_BLOCK_TOKENS, read_trace

from .reader import Reader, check_refusal

FOLDER = tempfile.TemporaryDirectory(prefix="cpattn-fuzz-")
FIELDS = ("timestamp", "input_length", "output_length")


def line_of(reader: Reader) -> bytes:
    if reader.rarely(8):
        return reader.take(reader.between(0, 60))
    if reader.rarely():
        return b'{"hash_ids":' + reader.one_of((b"[", b'{"a":')) * (50 * reader.between(0, 255))
    length = reader.between(1, 3 * TRACE_BLOCK_TOKENS)
    blocks = -(-length // TRACE_BLOCK_TOKENS)
    record: dict[str, Any] = {
        "timestamp": json_value(reader, reader.between(0, 99)),
        "input_length": json_value(reader, length),
        "output_length": json_value(reader, reader.between(0, 9)),
        "hash_ids": json_value(
            reader, [json_value(reader, reader.between(0, 9)) for _ in range(blocks)]
        ),
    }
    if reader.rarely():
        del record[reader.one_of(list(record))]
    if reader.rarely():
        return json.dumps(reader.one_of((1, None, [record], "text"))).encode()
    return json.dumps(record).encode()


def json_value(reader: Reader, value: Any) -> Any:
    other = reader.mostly(value)
    return other.decode() if isinstance(other, bytes) else other


def content_of(reader: Reader) -> bytes:
    if reader.rarely(8):
        return reader.take(2000)
    end = reader.one_of((b"\n", b"\r\n", b"\n\n \n"))
    return end.join(line_of(reader) for _ in range(reader.between(0, 4)))


def run(data: bytes) -> None:
    reader = Reader(data)
    is_packed = reader.rarely(8)
    limit = None if reader.flag() else reader.between(1, 3)
    is_damaged = reader.rarely(8)
    damage = reader.between(0, 200)
    content = content_of(reader)
    if is_packed and not reader.rarely(8):
        content = gzip.compress(content, 1)
    if is_damaged and damage < len(content):
        content = content[:damage] + content[damage + 1 :]
    path = Path(FOLDER.name, "trace.jsonl.gz" if is_packed else "trace.jsonl")
    path.write_bytes(content)
    try:
        requests = read_trace(path, limit=limit)
    except ValueError as error:
        check_refusal(error, f"read_trace: {path}")
        return
    assert 1 <= len(requests) <= (limit or len(requests))
    for request in requests:
        assert len(request.hash_ids) == -(-request.input_length // TRACE_BLOCK_TOKENS)
        values = [getattr(request, name) for name in FIELDS] + list(request.hash_ids)
        assert all(type(value) is int and 0 <= value < 2**63 for value in values)
    lines = [json.dumps(dataclasses.asdict(request)) for request in requests]
    path = Path(FOLDER.name, "again.jsonl")
    path.write_text("\n".join(lines), encoding="utf-8")
    assert read_trace(path) == requests
