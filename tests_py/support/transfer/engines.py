# SPDX-License-Identifier: Apache-2.0
"""Engines between processes, and their differences that tests have to know."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import pytest

from audit.records import note
from cpattn.integrations import mooncake, nixl


@dataclass(frozen=True)
class Engine:
    name: str
    distribution: str
    make: Callable[..., Any]
    import_package: Callable[[], Any]
    #: Regular expression for its sessions on 127.0.0.1.
    session: str
    #: Session of the right form without a process.
    nobody: str
    #: Whether a write needs its sources registered.
    registers_sources: bool
    #: Whether a batch with a refused block may be written in part.
    fails_in_part: bool
    #: Whether the next write to a peer after a timeout fails without another timeout.
    remembers_silence: bool

    def __str__(self) -> str:
        return self.name

    def require(self) -> None:
        try:
            self.import_package()
        except ImportError as error:
            pytest.skip(str(error))
        note("engine", f"{self.name}, between processes", version(self.distribution))


MOONCAKE = Engine(
    name="mooncake",
    distribution="mooncake-transfer-engine-non-cuda",
    make=mooncake.MooncakeEngine,
    import_package=mooncake._import_engine,
    session=r"127.0.0.1:\d+",
    nobody="127.0.0.1:1",
    registers_sources=False,
    fails_in_part=True,
    remembers_silence=True,
)
NIXL = Engine(
    name="nixl",
    distribution="nixl-cu12",
    make=nixl.NixlEngine,
    import_package=nixl._import_bindings,
    session=r"127.0.0.1:\d+/[0-9a-f]{16}",
    nobody="127.0.0.1:1/0123456789abcdef",
    registers_sources=True,
    fails_in_part=False,
    remembers_silence=False,
)
ENGINES = (MOONCAKE, NIXL)
