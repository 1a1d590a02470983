# SPDX-License-Identifier: Apache-2.0
"""Fixtures start the processes of replays."""

import pytest

from cpattn_lab.processes import workers as _workers


@pytest.fixture(autouse=True)
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork ranks from a server that has torch; those of tests_py/cli import it themselves."""

    def get_context(_: str) -> object:
        from support.distributed.distributed_worker import forking

        return forking()

    monkeypatch.setattr(_workers, "get_context", get_context)
