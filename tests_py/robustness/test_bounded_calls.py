# SPDX-License-Identifier: Apache-2.0
"""Calls that may hang are waited for only so long."""

import gc
import threading
import time
import weakref

import pytest

from cpattn.transfer.bounded import BoundedCalls, CallHangs

LONG = 60.0


class Result:
    """An object whose release can be seen."""


@pytest.fixture
def calls():
    return BoundedCalls("test")


@pytest.fixture
def let_go():
    event = threading.Event()
    yield event
    event.set()


def test_results_and_errors_come_back(calls):
    assert calls.run("a", LONG, divmod, 17, 5) == (3, 2)
    with pytest.raises(ZeroDivisionError):
        calls.run("a", LONG, divmod, 17, 0)
    with pytest.raises(TimeoutError, match="of the call itself"):
        calls.run("a", LONG, raise_, TimeoutError("of the call itself"))


def raise_(error):
    raise error


def test_threads_are_used_again(calls):
    threads = {calls.run("a", LONG, threading.current_thread) for _ in range(50)}
    assert len(threads) < 10
    assert all(thread.daemon for thread in threads)  # they do not keep the process alive


def eventually(condition):
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def returns(calls):
    """Return whether a call with the key "a" returns, or False while an earlier one hangs."""
    try:
        return calls.run("a", LONG, int) == 0
    except CallHangs:
        return False


def test_close_ends_the_threads_and_later_calls_have_others(calls):
    first = calls.run("a", LONG, threading.current_thread)
    calls.close()
    eventually(lambda: not first.is_alive())
    second = calls.run("a", LONG, threading.current_thread)
    assert second is not first
    eventually(lambda: not second.is_alive())  # it must end by itself


def test_arguments_and_results_are_let_go(calls):
    memory = Result()
    watched = weakref.ref(memory), weakref.ref(calls.run("a", LONG, Result))
    calls.run("a", LONG, id, memory)
    del memory
    eventually(lambda: all(one() is None for one in watched))  # its thread may still return

    class Wrong(ValueError):
        pass

    with pytest.raises(Wrong) as caught:
        calls.run("a", LONG, raise_, Wrong())
    watched = weakref.ref(caught.value)
    del caught
    eventually(lambda: gc.collect() >= 0 and watched() is None)


def test_what_a_call_returns_too_late_is_let_go_by_the_next(calls, let_go):
    results = []

    def late():
        let_go.wait(LONG)
        result = Result()
        results.append(weakref.ref(result))
        return result

    with pytest.raises(CallHangs):
        calls.run("a", 0.05, late)
    let_go.set()
    eventually(lambda: returns(calls))
    eventually(lambda: results[0]() is None)


def test_what_hangs_keeps_its_key_and_no_other(calls, let_go):
    with pytest.raises(CallHangs, match=r"^test: no answer for a in 0.05 s$"):
        calls.run("a", 0.05, let_go.wait, LONG)
    begin = time.monotonic()
    with pytest.raises(CallHangs, match=r"^test: an earlier call for a still hangs$"):
        calls.run("a", LONG, int)
    assert calls.run("b", LONG, int) == 0
    assert time.monotonic() - begin < LONG / 2
    let_go.set()
    eventually(lambda: returns(calls))


def test_close_does_not_wait_for_a_thread_that_did_not_start(calls, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda _: raise_(RuntimeError("no thread")))
        with pytest.raises(RuntimeError, match="no thread"):
            calls.run("a", LONG, int)
    begin = time.monotonic()
    calls.close()
    assert time.monotonic() - begin < LONG / 2


def test_close_waits_until_the_limit(calls, let_go):
    begun, limit = threading.Event(), 0.2

    def work():
        begun.set()
        let_go.wait(LONG)

    def run():
        with pytest.raises(CallHangs):
            calls.run("a", limit, work)

    begin = time.monotonic()
    caller = threading.Thread(target=run)
    caller.start()
    assert begun.wait(LONG)
    calls.close()
    assert limit <= time.monotonic() - begin < LONG / 2
    caller.join()
