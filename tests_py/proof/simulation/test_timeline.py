# SPDX-License-Identifier: Apache-2.0
"""Bytes and predicted times, against what a person counts."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from cpattn.proof import simulate

MESSAGE = 1 << 20  # bytes


def ring():
    rank, size = dist.get_rank(), dist.get_world_size()
    block = torch.zeros(MESSAGE, dtype=torch.uint8)
    for _ in range(3):
        works = [dist.irecv(torch.empty_like(block), (rank - 1) % size)]
        works.append(dist.isend(block, (rank + 1) % size))
        for work in works:
            work.wait()


def collectives():
    size = dist.get_world_size()
    x = torch.zeros(size * 100)
    dist.all_reduce(x)
    dist.all_gather([torch.empty_like(x) for _ in range(size)], x)
    dist.reduce_scatter(torch.empty(100), list(x.chunk(size)))
    dist.all_to_all_single(torch.empty_like(x), x)
    dist.broadcast(x, 0)


def test_bytes_are_those_that_leave_a_rank():
    sent = simulate(collectives, ranks=4, seeds=(0,)).facts["sent_bytes_by_rank"]
    whole = 4 * 4 * 100
    assert sent["all_reduce"] == [2 * 3 * whole // 4] * 4
    assert sent["all_gather"] == [3 * whole] * 4
    assert sent["reduce_scatter"] == sent["all_to_all_single"] == [3 * whole // 4] * 4
    assert sent["broadcast"] == [whole, 0, 0, 0]


def test_messages_take_their_latency_and_their_bytes():
    """Three messages one after the other take three times one."""
    slow = {"latency_us": 1e6, "gbps": MESSAGE * 8 / 1e9}
    facts = simulate(ring, ranks=2, seeds=(0,), **slow).facts
    assert facts["calls_by_rank"]["send"] == [3, 3]
    seconds = facts["predicted_seconds_by_rank"][0]
    computed = simulate(ring, ranks=2, seeds=(0,), latency_us=0, gbps=1e6).facts
    # Both directions share a link of a rank: 2 messages of 1 s and 1 s of bytes in each round.
    # What is beyond is the CPU time of the program, which the fast links show as well.
    assert seconds >= 3 * 2 * 2
    assert computed["predicted_seconds_by_rank"][0] < 3 * 2 * 2


def test_the_trace_has_tracks_of_every_rank(tmp_path):
    path = tmp_path / "trace.json"
    simulate(ring, ranks=2, trace=path)
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0", "rank 1"}
    spans = [event for event in events if event["ph"] == "X"]
    sends = [event for event in spans if event["name"] == "send"]
    assert [event["args"]["sent_bytes"] for event in sends] == [MESSAGE] * 6
    assert all(__file__ in event["args"]["place"] for event in sends)
    tracks = defaultdict(list)
    for event in spans:
        tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert set(tracks) == {(pid, tid) for pid in (0, 1) for tid in (0, 1)}
    for track in tracks.values():
        track.sort()
        for (_, end), (begin, _) in pairwise(track):
            assert begin == pytest.approx(end) or begin > end
