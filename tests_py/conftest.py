# SPDX-License-Identifier: Apache-2.0
"""Preparations for all tests: makes torch safe before its first import; header; fixtures."""

import contextlib
import gc
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from audit import durations, leftovers, machine, records, skips, table
from cpattn import __version__, _core, active_isa, supported_isas, torch_guard
from support.children import Children, restore_signals
from support.command_line import CommandLine
from support.inner_runs import InnerRuns

TORCH_GUARD = torch_guard.prepare()
restore_signals()
with contextlib.suppress(ImportError):  # some environments of engines lack it
    from hypothesis import HealthCheck, settings

    # Examples have no time limit: on a busy machine or with a sanitizer they take any time.
    unhurried = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("cpattn", max_examples=50, **unhurried)
    settings.register_profile("quick", settings.get_profile("cpattn"), max_examples=10)
    settings.register_profile("thorough", settings.get_profile("cpattn"), max_examples=1000)
    settings.load_profile("cpattn")

# Instruction sets that this machine lacks are listed, too, so that their skips are visible.
ISAS = [
    *supported_isas(),
    *(isa for isa in machine.INSTRUCTION_SETS if isa not in supported_isas()),
]


def pytest_addoption(parser: pytest.Parser) -> None:
    for part in (skips, records, table, durations):
        part.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    for part in (skips, records, table, durations, leftovers):
        part.configure(config)


def version_of(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:  # some environments do without it
        return f"no {package}"


def pytest_report_header() -> list[str]:
    header = f"cpattn {__version__}, {version_of('torch')}, {version_of('numpy')}"
    isas = f"instruction set {active_isa()} of {', '.join(supported_isas())}"
    return [header, isas, *([TORCH_GUARD] if TORCH_GUARD else [])]


def pytest_collection_finish() -> None:
    """Freeze modules and tests, which stay to the end, so that garbage collections skip them."""
    gc.freeze()


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test with every instruction set of this processor family in turn."""
    if request.param not in supported_isas():
        pytest.skip(f"no {request.param} kernels here")
    records.note("instruction set", request.param)
    before = active_isa()
    _core.set_isa(request.param)
    yield request.param
    _core.set_isa(before)


@pytest.fixture
def children() -> Iterator[Children]:
    """Start processes that end with the test."""
    with contextlib.closing(Children()) as started:
        yield started


@pytest.fixture(scope="module")
def module_children() -> Iterator[Children]:
    """Start processes as `children` does, for all tests of a module."""
    with contextlib.closing(Children()) as started:
        yield started


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """Limit torch to one thread: several wait for each other longer than small operators take."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def two_hosts(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Make two network namespaces with a cable between them, of a rate in Gbit/s if given."""
    from cpattn_lab.processes.hosts import Hosts, HostsError

    hosts = Hosts(2, link_gbps=getattr(request, "param", None))
    try:
        hosts.__enter__()
    except HostsError as error:
        pytest.skip(str(error))
    yield hosts
    hosts.__exit__(None, None, None)


@pytest.fixture
def inner_runs(tmp_path: Path, children: Children) -> InnerRuns:
    """Run pytest on files of the test."""
    return InnerRuns(tmp_path, children)


@pytest.fixture
def command_line(children: Children) -> Iterator[CommandLine]:
    """Start `cpattn`; all its processes end with the test."""
    with CommandLine(children) as line:
        yield line
