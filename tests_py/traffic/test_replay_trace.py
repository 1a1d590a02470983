# SPDX-License-Identifier: Apache-2.0
"""Traces are read, generated and scaled, and stand for tokens."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from audit import trace as real_trace
from audit.records import note
from cpattn.scheduling.prefix_cache import PrefixCache
from cpattn.scheduling.request import Request
from cpattn.scheduling.scheduler import prefill_batches
from cpattn_lab.traffic.trace import (
    block_tokens_of,
    generate_trace,
    read_trace,
    scale_lengths,
    unbounded_hits,
)

GOOD = {"timestamp": 3, "input_length": 700, "output_length": 5, "hash_ids": [0, 9]}


def write(path: Path, *records: object) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt") as file:
        file.write(text)
    return path


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_reads_plain_and_compressed(tmp_path, name):
    path = write(tmp_path / name, GOOD, {**GOOD, "timestamp": 4})
    first = Request(3, 700, 5, (0, 9))
    assert read_trace(path) == [first, Request(4, 700, 5, (0, 9))]
    assert read_trace(path, limit=1) == [first]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timestamp": None}, "line 2: timestamp must be an integer >= 0, got None"),
        ({"input_length": 0}, "line 2: input_length must be an integer >= 1, got 0"),
        ({"output_length": 1.5}, "line 2: output_length must be an integer >= 0, got 1.5"),
        ({"hash_ids": 4}, "line 2: hash_ids must be a list, got 4"),
        ({"hash_ids": [0, -1]}, r"line 2: hash_ids\[1\] must be an integer >= 0, got -1"),
        ({"hash_ids": [0]}, "line 2: input_length 700 has 2 blocks .* hash_ids has 1"),
    ],
)
def test_a_bad_line_is_named(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        read_trace(write(tmp_path / "t.jsonl", GOOD, {**GOOD, **change}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "line 1: not JSON"),
        (b"[" * 100_000, "line 1: not JSON .maximum recursion depth"),
        (b'{"timestamp": ' + b"9" * 5000 + b"}", "line 1: not JSON .Exceeds the limit"),
        (b"[1]", r"expected an object, got \[1\]"),
        (b"\n", "read_trace: .*t.jsonl: must hold a request, got none"),
        (b"\xff\xfe", r"t\.jsonl: .*can't decode"),
    ],
)
def test_what_is_no_json_object_is_named(tmp_path, content, message):
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_trace(path)


@pytest.mark.parametrize("wrong", [None, 5, [5], ["request"], [None]])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("scale_lengths", lambda x: scale_lengths(x, 2)),
        ("unbounded_hits", lambda x: list(unbounded_hits(x, 512))),
        (
            "prefill_batches",
            lambda x: list(
                prefill_batches(x, PrefixCache(8, page_size=4, block_tokens=8), token_budget=8)
            ),
        ),
    ],
)
def test_what_are_no_requests_is_named(name, call, wrong):
    with pytest.raises(TypeError, match=rf"^{name}: requests(\[0\])? must be "):
        call(wrong)


@pytest.mark.parametrize("ids", [(), (0,), (0, 1, 2)])
def test_a_prompt_has_an_id_for_each_block(ids):
    batches = prefill_batches(
        [Request(0, 10, 1, ids)], PrefixCache(8, page_size=4, block_tokens=8), token_budget=64
    )
    message = f"hash_ids must be 2 for a prompt of 10 tokens in blocks of 8, got {len(ids)}"
    with pytest.raises(ValueError, match=message):
        next(batches)


def test_a_damaged_file_is_named(tmp_path):
    path = write(tmp_path / "t.jsonl.gz", *[GOOD] * 100)
    whole = path.read_bytes()
    for damaged in (b"no gzip", whole[:-20], whole[:20] + b"\xff" * 40 + whole[60:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"t\.jsonl\.gz: "):
            read_trace(path)


def test_generated_traffic_looks_like_chat(tmp_path):
    trace = generate_trace(2000, seed=5)
    assert trace == generate_trace(2000, seed=5) != generate_trace(2000, seed=6)
    assert read_trace(write(tmp_path / "t.jsonl", *[vars(r) for r in trace])) == trace
    lengths = np.array([request.input_length for request in trace])
    hits = np.array(list(unbounded_hits(trace, 512)))
    assert 5_000 < np.median(lengths) < 9_000
    assert 10_000 < lengths.mean() < 16_000
    assert lengths.min() >= 890
    assert 0.28 < hits.sum() / lengths.sum() < 0.45
    assert 1_800 < np.median(lengths - hits) < 4_000
    assert 0.005 < np.mean(hits == lengths) < 0.06
    assert all(request.hash_ids[0] == 0 for request in trace)
    assert 200 < np.median([request.output_length for request in trace]) < 500


@pytest.fixture
def real():
    path = real_trace.find()
    if path is None:
        pytest.skip("CPATTN_TRACE names no file with the real trace")
    digest = real_trace.sha256(path)
    assert digest == real_trace.SHA256, f"{path} is another trace"
    note("trace", "real", f"SHA-256 {digest[:12]}")
    return read_trace(path)


def assert_hashes_of_prefixes(trace: list[Request]) -> None:
    """Check what replays assume about any trace.

    Requests arrive in order. A hash id stands for its block and all before it: it has one position
    and one predecessor, so requests share ids up to some block and none behind it. A last block
    that is not full is shared by requests of one length only.
    """
    arrivals = [request.timestamp for request in trace]
    assert arrivals == sorted(arrivals)
    before: dict[int, int | None] = {}
    lengths: dict[int, int] = {}
    for request in trace:
        ids = request.hash_ids
        assert len(ids) == -(-request.input_length // 512)
        for previous, block in zip((None, *ids), ids, strict=False):
            assert before.setdefault(block, previous) == previous
            assert block not in lengths or block == ids[-1]
        if request.input_length % 512:
            assert lengths.setdefault(ids[-1], request.input_length) == request.input_length
    # Ids count from 0 in the order in which they are first seen.
    assert list(before) == list(range(len(before)))


def test_the_real_trace_is_read_to_the_last_request(real):
    # Other programs counted these numbers once.
    assert len(real) == 4_000
    assert sum(request.input_length for request in real) == 53_249_359
    assert sum(request.output_length for request in real) == 1_388_321
    assert sum(unbounded_hits(real, 512)) == 17_647_225
    assert real[-1].timestamp == 1_301_999
    assert_hashes_of_prefixes(real)


def test_generated_traffic_has_hashes_of_prefixes():
    for seed in range(3):
        assert_hashes_of_prefixes(generate_trace(500, seed=seed))


def test_scaling_keeps_the_blocks():
    trace = generate_trace(200)
    for divisor in (1, 2, 8, 64, 512):
        for before, after in zip(trace, scale_lengths(trace, divisor), strict=True):
            assert after.hash_ids == before.hash_ids
            assert len(after.hash_ids) == -(-after.input_length // (512 // divisor))
            assert 0 <= after.input_length * divisor - before.input_length < divisor


def test_equal_blocks_are_equal_tokens():
    a = Request(0, 20, 1, (4, 7, 5))
    b = Request(0, 24, 1, (4, 6, 5))
    kinds = {"block_tokens": 8, "vocab_size": 1000, "seed": 3}
    tokens_a, tokens_b = block_tokens_of(a, 0, 20, **kinds), block_tokens_of(b, 0, 24, **kinds)
    np.testing.assert_array_equal(tokens_a[:8], tokens_b[:8])
    np.testing.assert_array_equal(tokens_a[16:], tokens_b[16:20])
    assert (tokens_a[8:16] != tokens_b[8:16]).any()
    np.testing.assert_array_equal(block_tokens_of(a, 5, 18, **kinds), tokens_a[5:18])
    assert (block_tokens_of(a, 0, 20, **{**kinds, "seed": 4}) != tokens_a).any()
