# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests of ranks."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    """Make the group of a world whose only rank is this process."""
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def answers_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the answers of ranks by size and program of a world; each world runs once."""
    from support.distributed.distributed_worker import run_world

    @cache
    def answers(size: int, program: Any, *arguments: Any) -> list[Any]:
        return run_world(size, tmp_path_factory.mktemp("world"), program, *arguments)

    return answers
