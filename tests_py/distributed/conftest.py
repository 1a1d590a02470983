# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests of ranks."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    """The group of a world whose only rank is this process."""
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
