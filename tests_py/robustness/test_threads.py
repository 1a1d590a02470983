# SPDX-License-Identifier: Apache-2.0
"""docs/how_to/threads.md says rightly which calls leave the GIL to others or end by Ctrl-C."""

import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

import cpattn
from cpattn import _core, reference
from support.api.thread_calls import MAKERS
from support.places import ROOT
from support.public_names import PUBLIC

pytestmark = pytest.mark.slow


TEXT = ROOT.joinpath("docs/how_to/threads.md").read_text()
TABLE = {
    name: (gil, interrupt)
    for name, gil, interrupt in re.findall(r"^\| `([\w.]+)` \| (.*?) \| (.*?) \|$", TEXT, re.M)
}
RELEASE = [name for name, (gil, _) in TABLE.items() if gil != "no"]
KEEP = [name for name, (gil, _) in TABLE.items() if gil == "no"]
STOP = [name for name, (_, interrupt) in TABLE.items() if interrupt == "yes"]
GO_ON = [name for name, (_, interrupt) in TABLE.items() if interrupt != "yes"]

# These public names loop over nothing that could grow, or only describe something.
CONSTANT = {
    "active_isa", "supported_isas", "set_num_threads", "profile", "can_apply_cp",
    "can_dsa_prefill_cp_interleave", "can_fuse_split_qk_norm", "dsa_use_prefill_cp",
    "decode_targets", "get_topk_transform_method", "kv_to_page_num", "slice_heads",
    "kv_start_layer", "fill_kv_args", "setup_state_kv_args", "get_layer_owner",
    "get_layer_shard_range", "pull_targets",
}  # fmt: skip
# These loop over buffers, and a server has only some hundred of them.
BUFFERS = {
    "build_transfer_entry_pairs", "get_mha_kv_ptrs_with_pp", "get_mla_kv_ptrs_with_pp",
    "is_elided_entry", "pack_int_lists", "plan_send_aux", "plan_send_state", "register",
    "unpack_int_lists",
}  # fmt: skip


def test_every_function_that_computes_is_in_the_table():
    functions = {
        value.__name__ if name == "attend_rank" else name  # attend_rank is its other name
        for name, value in PUBLIC.items()
        if callable(value) and not isinstance(value, type)
    }
    oracle = {f"reference.{name}" for name in reference.__all__}
    assert (functions | oracle) - CONSTANT - BUFFERS - TABLE.keys() == set()
    assert TABLE.keys() - set(KEEP) == MAKERS.keys()


def test_every_line_is_checked():
    assert set(RELEASE) | set(KEEP) == TABLE.keys()
    assert len(STOP) > 25
    assert len(GO_ON) > 10
    assert all(text.startswith("no") for _, text in TABLE.values() if text != "yes")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = _core.default_num_threads()
    cpattn.set_num_threads(1)
    yield
    cpattn.set_num_threads(before)


class Watcher:
    """A thread that counts how often it runs while the main thread is within a call."""

    def __init__(self) -> None:
        self.within = self.ended = False
        self.count = 0
        self.thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self.ended:
            self.count += self.within
            time.sleep(1e-5)

    def counts_within(self, call: Callable[[], object], wanted: int, calls: int) -> int:
        """Count until `wanted`, over at most `calls` calls."""
        self.count = 0
        for _ in range(calls):
            self.within = True
            call()
            self.within = False
            if self.count >= wanted:
                break
        return self.count


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    """Start a watcher, with a switch interval so long that Python itself lets no thread in."""
    interval, watcher = sys.getswitchinterval(), Watcher()
    watcher.thread.start()
    sys.setswitchinterval(1000)
    yield watcher
    sys.setswitchinterval(interval)
    watcher.ended = True
    watcher.thread.join()


has_gil = pytest.mark.skipif(
    not getattr(sys, "_is_gil_enabled", lambda: True)(), reason="there is no GIL"
)


@has_gil
@pytest.mark.parametrize("name", RELEASE)
def test_other_threads_run_within_calls(watcher, name):
    call = MAKERS[name](64)
    assert watcher.counts_within(call, wanted=5, calls=200_000) >= 5  # busy machines need many


def test_a_call_that_keeps_the_gil_would_be_seen(watcher):
    numbers = list(range(100_000))
    assert watcher.counts_within(lambda: sum(numbers), wanted=5, calls=100) == 0


class Alarm:
    """A handler of signals every 10 ms that counts them, and raises from `last` on."""

    def __init__(self) -> None:
        self.count, self.last = 0, sys.maxsize

    def __call__(self, number: int, frame: object) -> None:
        self.count += 1
        if self.count >= self.last:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    def during(self, call: Callable[[], object], last: int = sys.maxsize) -> int:
        self.count, self.last = 0, last
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        try:
            call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return self.count


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    alarm = Alarm()
    before = signal.signal(signal.SIGALRM, alarm)
    yield alarm
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


# Python runs a handler at most before and after the call of the core; more runs are within it.
OUTSIDE = 2
LARGEST = 1 << 17


@pytest.mark.parametrize("name", STOP)
def test_signals_are_handled_within_calls_and_end_them(alarm, name):
    size = 32
    while not (alarm.during(call := MAKERS[name](size)) > OUTSIDE and ends(alarm, call)):
        size *= 2
        assert size <= LARGEST


def ends(alarm: Alarm, call: Callable[[], object]) -> bool:
    """Return whether the first signal ends the call."""
    try:
        alarm.during(call, last=1)
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.parametrize("name", [name for name in GO_ON if name not in KEEP])
def test_signals_are_handled_behind_calls_that_go_on(alarm, name):
    call = MAKERS[name](256)
    begin = time.monotonic()
    assert alarm.during(call) <= 2 * OUTSIDE or time.monotonic() - begin < 0.05
