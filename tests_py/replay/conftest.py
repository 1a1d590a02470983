# SPDX-License-Identifier: Apache-2.0
"""Fixtures of replays: where their processes come from."""

import pytest

from cpattn_lab.processes import workers as _workers


@pytest.fixture(autouse=True)
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks ranks from a server that has torch; those of tests_py/cli import it themselves."""

    def get_context(_: str) -> object:
        from support.distributed.distributed_worker import forking

        return forking()

    monkeypatch.setattr(_workers, "get_context", get_context)
