# SPDX-License-Identifier: Apache-2.0
"""Private process state of each rank, in place during the rank's turns."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import distributed_c10d as c10d

# Programs may hold a reference to this object, so it stays and its contents are exchanged.
_ENVIRON: Any = os.environ
# Names in torch.distributed.distributed_c10d, with the functions that make their first values.
_WORLD: dict[str, Callable[[], Any]] = {
    "_world": lambda: c10d._World(),
    "_pg_map": dict,
    "_pg_names": dict,
    "_pg_group_ranks": dict,
    "_pg_backend_config": dict,
    "_tags_to_pg": dict,
    "_pg_to_tag": dict,
    "_group_count": int,
    "_backend": lambda: None,
    "_default_pg_init_method": lambda: None,
}


@dataclass
class Randomness:
    """State of the global random generators."""

    python: Any = field(default_factory=random.getstate)
    numpy: Any = field(default_factory=np.random.get_state)
    torch: Any = field(default_factory=torch.get_rng_state)

    def apply(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002 - what programs use
        torch.set_rng_state(self.torch)


class ProcessState:
    """Process state of one rank.

    It has environment, working folder, arguments, `sys.path`, `__main__`, groups, random numbers
    and own modules.

    Parameters
    ----------
    environment : mapping
        Environment of the rank.
    argv : sequence of str
        ``sys.argv``.
    private : sequence of paths
        Folders whose modules every rank imports for itself, as processes do.
    own_modules : sequence of str
        Packages that every rank imports for itself, wherever they are.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        argv: Sequence[str],
        private: Sequence[Path] = (),
        own_modules: Sequence[str] = (),
    ) -> None:
        encode = _ENVIRON.encodekey
        self._environment = {encode(name): encode(value) for name, value in environment.items()}
        self._argv, self._path = list(argv), list(sys.path)
        self._folder = _working_folder()
        self._world: dict[str, Any] = {name: make() for name, make in _WORLD.items()}
        self._randomness = Randomness()
        self._private = tuple(f"{folder}{os.sep}" for folder in private)
        self._own_modules = frozenset(own_modules)
        self._modules: dict[str, types.ModuleType] = {}
        self._known = 0
        self._excepthook = sys.excepthook
        self._dtype = torch.get_default_dtype()
        self.main = types.ModuleType("__main__")

    def enter(self) -> None:
        """Put the state in place."""
        self._outside = (_ENVIRON._data, sys.argv, sys.path, sys.modules["__main__"])
        self._outer_folder = _working_folder()
        self._outer_dtype = torch.get_default_dtype()
        _ENVIRON._data = self._environment
        sys.argv, sys.path = self._argv, self._path
        _go_to(self._folder)
        sys.modules.update(self._modules)
        sys.modules["__main__"] = self.main
        sys.excepthook, self._excepthook = self._excepthook, sys.excepthook
        self._known = len(sys.modules)
        self._swap_world()
        self._randomness.apply()
        torch.set_default_dtype(self._dtype)

    def leave(self) -> None:
        """Restore the process, and keep the state as the rank has changed it."""
        self._randomness = Randomness()
        self._dtype = torch.get_default_dtype()
        torch.set_default_dtype(self._outer_dtype)
        self._swap_world()
        self._argv, self._path = sys.argv, sys.path
        self._folder = _working_folder()
        _go_to(self._outer_folder)
        sys.excepthook, self._excepthook = self._excepthook, sys.excepthook
        if (self._private or self._own_modules) and len(sys.modules) != self._known:
            self._modules |= {n: m for n, m in sys.modules.items() if self._is_private(n, m)}
        for name in self._modules:
            sys.modules.pop(name, None)
        environment, sys.argv, sys.path, main = self._outside
        _ENVIRON._data = environment
        sys.modules["__main__"] = main

    def _swap_world(self) -> None:
        for name, value in self._world.items():
            self._world[name] = getattr(c10d, name)
            setattr(c10d, name, value)

    def _is_private(self, name: str, module: types.ModuleType) -> bool:
        if name == "__main__":
            return False
        if name.partition(".")[0] in self._own_modules:
            return True
        file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
        return f"{file}{os.sep}".startswith(self._private) if self._private else False


def _working_folder() -> str | None:
    """Return the working folder, or None if it has been removed."""
    try:
        return os.getcwd()
    except OSError:
        return None


def _go_to(folder: str | None) -> None:
    if folder is not None and folder != _working_folder():
        with contextlib.suppress(OSError):  # it has been removed
            os.chdir(folder)


@contextlib.contextmanager
def set_aside(names: Sequence[str]) -> Iterator[None]:
    """Take packages out of `sys.modules`, so that ranks import them anew, and put them back."""
    aside = {name: sys.modules[name] for name in sys.modules if name.partition(".")[0] in names}
    for name in aside:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(aside)
