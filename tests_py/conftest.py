# SPDX-License-Identifier: Apache-2.0
"""What all tests share: torch made safe before anything imports it, and a header."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from importlib.metadata import version

import pytest

from cpattn import __version__, _core, active_isa, supported_isas, torch_guard

TORCH_GUARD = torch_guard.prepare()


def pytest_report_header() -> list[str]:
    header = f"cpattn {__version__}, torch {version('torch')}, numpy {version('numpy')}"
    isas = f"instruction set {active_isa()} of {', '.join(supported_isas())}"
    return [header, isas, *([TORCH_GUARD] if TORCH_GUARD else [])]


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: what collects garbage often need not look at them."""
    gc.freeze()


@pytest.fixture(params=supported_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set of this machine in turn, forced for the length of the test."""
    before = active_isa()
    _core.set_isa(request.param)
    yield request.param
    _core.set_isa(before)


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """Threads of torch would wait for each other longer than small operators take."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
