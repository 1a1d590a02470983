# SPDX-License-Identifier: Apache-2.0
"""A plug-in of pytest that collects tests once and then runs those it is asked for, in a fork.

Asked in JSON, a line each, on the file descriptor CPATTN_MUTATION_ASK: {"tests": [ids], "limit":
seconds}. Answered on CPATTN_MUTATION_ANSWER: {"outcome": "passed", "failed" or "hung", "by": id}.
The first line of answers holds the ids of all tests.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from typing import Any

import hypothesis
import pytest
from _pytest.runner import runtestprotocol

from mutate.limits import limit_memory

# What fails need not be small, and a run is like the one before.
hypothesis.settings.register_profile(
    "mutation",
    database=None,
    derandomize=True,
    deadline=None,
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    items = {item.nodeid: item for item in session.items}
    with (
        os.fdopen(int(os.environ["CPATTN_MUTATION_ASK"])) as asked,
        os.fdopen(int(os.environ["CPATTN_MUTATION_ANSWER"]), "w") as answers,
    ):
        print(json.dumps(sorted(items)), file=answers, flush=True)
        for line in asked:
            question = json.loads(line)
            chosen = [items[test] for test in question["tests"]]
            print(json.dumps(_run(chosen, question["limit"])), file=answers, flush=True)
    os._exit(0)


def _run(items: list[pytest.Item], limit: float) -> dict[str, Any]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            os.close(reader)
            limit_memory()
            code = _first_failure(items, writer)
        finally:
            os._exit(code)
    os.close(writer)
    deadline = time.monotonic() + limit
    said, status = b"", None
    while status is None:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        part = os.read(reader, 1 << 16) if ready else b""
        said += part
        if not part:  # it has ended, or will not in time
            os.killpg(child, signal.SIGKILL) if not ready else None
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            hung = not ready
    os.close(reader)
    started = said.decode().split()
    by = items[int(started[-1])].nodeid if started else ""
    if hung:
        return {"outcome": "hung", "by": by}
    return {"outcome": "failed" if status else "passed", "by": by if status else ""}


def _first_failure(items: list[pytest.Item], writer: int) -> int:
    """Tells which test it begins, so that this is known of one that ends the process."""
    for i, item in enumerate(items):
        os.write(writer, f"{i}\n".encode())
        following = items[i + 1] if i + 1 < len(items) else None
        if any(report.failed for report in runtestprotocol(item, log=False, nextitem=following)):
            return 1
    return 0
