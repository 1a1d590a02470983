# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the installed sglang for tests that call it in their own process, or in ranks."""

from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(scope="module")
def sglang() -> SimpleNamespace:
    """Import the planning parts of sglang."""
    from support.sglang import sglang_planning  # needs torch and sglang

    return sglang_planning.load()


@pytest.fixture
def switch(sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield the plug-in's module of hooks; afterwards all hooks pass through again."""
    for variable in ("CPATTN_PLUGINS", "CPATTN_SGLANG_PARTS"):
        monkeypatch.delenv(variable, raising=False)
    plugin = import_module("cpattn.integrations.sglang.plugin")
    yield plugin
    plugin.uninstall()


def run_cases(rank: int, worker: str, *arguments: Any) -> Any:
    return import_module(worker).run_cases(rank, *arguments)  # this process has no stand-ins


@pytest.fixture(scope="module", params=[2, 4], ids="{} ranks".format)
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the answers of each rank: the worker that a test module names runs its cases."""
    from support.distributed.distributed_worker import run_world

    size, (worker, *cases) = request.param, request.module.WORLD
    path, preload = tmp_path_factory.mktemp("world"), "support.sglang.sglang_runtime"
    return run_world(size, path, run_cases, worker, size, *cases, preload=preload)
