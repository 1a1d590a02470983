# SPDX-License-Identifier: Apache-2.0
"""Ranks that others name as lost, versions that ranks tell each other, and waits."""

import threading
import time
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpattn import __version__
from cpattn.distributed.transport import terms, versions
from cpattn.distributed.transport.rails import Rails
from cpattn.distributed.transport.roll_call import HOSTS, RollCall, Watch, Words
from cpattn.distributed.transport.timeouts import LAST_WORDS_OF_THE_WAITING
from cpattn.distributed.transport.waiting import NOT_YET, Posted, Wait, have_come
from support.distributed.disagreements import run_agreements
from support.distributed.distributed_worker import run_world
from support.time_limits import BUSY

WORDS = st.builds(
    Words,
    st.lists(st.integers(0, 2**31 - 1), max_size=16).map(tuple),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=100),
    st.booleans(),
)


@given(WORDS)
def test_words_arrive_as_they_were_said(words):
    data = words.encoded()
    assert len(data) == len(Words((), "").encoded())
    assert data[-1] == 1
    assert Words.decoded(data) == words


def test_words_that_are_too_long_are_cut():
    words = Words.decoded(Words(tuple(range(20)), "é" * 1000, True).encoded())
    assert words.missed == tuple(range(16))
    assert set(words.reason.rstrip("�")) == {"é"}


@pytest.fixture
def roll_call(world):
    """Return rank 0's roll call of four ranks, without the others."""
    one = RollCall(world, {})
    one._words = one._words.new_zeros(4, one._words.shape[1])
    one._view = one._words.numpy()
    return one


GONE = {1: "gone"}
MISSED = "it has left as it missed this rank: closed"


@pytest.mark.parametrize(
    ("said", "missing", "named"),
    [
        ({}, {2: "closed"}, {2: "closed"}),
        # If a missing rank missed another one, that one is named instead.
        (
            {1: Words((2,), "closed"), 2: Words((3,), "timed out", True)},
            GONE,
            {3: "rank 2 says: timed out"},
        ),
        # A rank that left by its own error is named with it.
        (
            {1: Words((2,), "gone"), 2: Words((), "MemoryError: none")},
            GONE,
            {2: "it has left by an error: MemoryError: none"},
        ),
        # A rank that missed this one is named if there is no other.
        ({1: Words((0,), "closed")}, GONE, {1: MISSED}),
        ({1: Words((0,), "closed")}, GONE | {3: "no rows came"}, {3: "no rows came"}),
        # Ranks that miss each other are named if there are no others.
        ({1: Words((2,), "closed"), 2: Words((1,), "closed")}, GONE, GONE),
    ],
)
def test_who_is_named(roll_call, said, missing, named):
    assert roll_call.heard() == {}
    for rank, words in said.items():
        roll_call._view[rank] = list(words.encoded())
    assert roll_call.named(0, missing) == named


class Ended:
    """Host on which ranks have ended, with the ranks of its and other hosts."""

    def __init__(self, ranks: list[int], hosts: tuple[tuple[int, ...], ...]) -> None:
        self.ranks = ranks
        self.rails = Rails(hosts, 0)

    def ended(self) -> list[int]:
        return self.ranks


def test_a_rank_that_has_ended_is_lost_to_those_that_wait_for_it(world, roll_call, monkeypatch):
    """Rows that it had sent get some time, counted from the begin of the wait for it."""
    monkeypatch.setitem(HOSTS, world, Ended([1, 2], ((0, 1, 2, 3),)))
    watch = Watch(world, roll_call, time.monotonic())
    end = time.monotonic() + 2 * LAST_WORDS_OF_THE_WAITING
    while time.monotonic() < end:
        assert watch.losses(3) == ({}, False)
        time.sleep(0.01)
    assert watch.losses(1) == watch.losses(2) == ({}, False)
    time.sleep(LAST_WORDS_OF_THE_WAITING)
    gone = dict.fromkeys((1, 2), "its process has ended")
    assert watch.losses(2) == (gone, False)


def test_ranks_of_other_hosts_are_told_of_any_that_has_ended(world, roll_call, monkeypatch):
    """They may wait for it, but cannot see its process."""
    monkeypatch.setitem(HOSTS, world, Ended([1], ((0, 1), (2, 3))))
    watch = Watch(world, roll_call, time.monotonic())
    assert watch.losses(2) == ({}, False)
    time.sleep(LAST_WORDS_OF_THE_WAITING)
    assert watch.losses(2) == ({1: "its process has ended"}, False)


def told_by(layout: int, version: str) -> list[int]:
    own = versions._core.__version__
    try:
        versions._core.__version__ = version
        return versions.own_values(layout)
    finally:
        versions._core.__version__ = own


OTHER = "9.9.9 (layout ffffffffffffffff)"
OWN = f"{__version__} (layout 0000000000000001)"


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([told_by(terms.layout(), "0.1.0"), told_by(terms.layout(), "0.2.0")], None),
        (
            [told_by(1, __version__), told_by(-1, "9.9.9"), told_by(1, __version__)],
            f"cpattn of rank 1 is {OTHER}, of rank 0 {OWN}",
        ),
        (
            [told_by(1, __version__), [7] * versions.NUM_VALUES, [8] * versions.NUM_VALUES],
            f"cpattn of rank 0 is {OWN}, of rank 1 another program",
        ),
    ],
)
def test_versions_of_other_layouts_are_named(ranks, said):
    assert versions.difference(ranks) == said


class Work:
    """Work that takes so long, or its timeout, and may fail; records the waiting thread."""

    def __init__(self, seconds: float = 0.0, error: Exception | None = None) -> None:
        self.seconds, self.error, self.thread = seconds, error, None
        self.ends = threading.Event()

    def wait(self, longest: timedelta = timedelta(1)) -> None:
        self.thread = threading.current_thread()
        if self.ends.wait(min(self.seconds, longest.total_seconds())):
            return
        if self.error or self.seconds > longest.total_seconds():
            raise self.error or RuntimeError("timed out")


def test_all_works_share_the_time_of_a_wait():
    posted = Posted("test", [(rank, Work(60)) for rank in (1, 2, 3)])
    begin = time.monotonic()
    wait = Wait(posted, 0.2)
    wait.join(10)
    assert wait.is_over()
    assert 0.2 <= time.monotonic() - begin < 0.2 + BUSY
    assert set(posted.failures) == {1, 2, 3}


@pytest.mark.parametrize(("longest", "over"), [(0.5, True), (60.0, False)])
def test_an_abandoned_wait_is_awaited_where_that_is_soon(longest, over):
    work = Work(60.0)
    wait = Wait(Posted("test", [(1, work)]), longest)
    begin = time.monotonic()
    wait.abandon()
    assert wait.is_over() is over
    assert time.monotonic() - begin < 0.6 + BUSY
    work.ends.set()
    wait.join(10)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    return {size: run_world(size, tmp_path_factory.mktemp("w"), run_agreements) for size in (2, 3)}


@pytest.mark.parametrize("size", [2, 3])
def test_an_agreement_needs_a_thread_only_for_who_is_late_and_beside_rows(worlds, size):
    for first, missed, beside, last in worlds[size]:
        for case in (first, missed, beside, last):
            wanted = [[[rank, turn, 0] for rank in range(size)] for turn in range(5)]
            assert case["told"] == wanted
        assert first["threads"] == last["threads"] == 0
        assert missed["threads"] == 5
        assert beside["threads"] == 6  # one more, for the rows themselves
        assert beside["ahead"] == [list(range(size))]


@pytest.mark.parametrize("over_soon", [True, False])
def test_what_is_over_soon_is_awaited_in_the_calling_thread(over_soon):
    works = [(1, Work(error=RuntimeError("closed"))), (2, Work()), (1, Work())]
    posted = Posted("test", works)
    wait = Wait(posted, 60.0, over_soon=over_soon)
    wait.join(BUSY)
    assert wait.is_over()
    assert list(posted.failures) == [1]
    threads = [work.thread for _, work in works]
    assert (threads[1] is threading.current_thread()) is over_soon
    assert threads[2] is None  # this rank has failed


def test_messages_are_looked_for_by_their_last_numbers():
    ends = np.array([5, NOT_YET, 0])
    assert not have_come(None)
    begin = time.monotonic()
    assert not have_come(ends)
    assert time.monotonic() - begin >= 0.002
    ends[1] = -1
    assert have_come(ends)
    assert have_come(ends[:0])
