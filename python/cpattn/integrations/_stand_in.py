# SPDX-License-Identifier: Apache-2.0
"""Modules under the name of a missing package, for code that imports the package."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NoReturn


def refuse_to_replace(package: str) -> None:
    """Raise ImportError if a package of this name exists."""
    if package in sys.modules or find_spec(package) is not None:
        raise ImportError(
            f"cpattn.integrations.{package}.install: a package {package} is there already; "
            "it is not replaced"
        )


def missing(package: str, supplied: Iterable[str]) -> Callable[[str], NoReturn]:
    """Return the ``__getattr__`` of a stand-in for CPUs, which refuses other names."""

    def refuse(name: str) -> NoReturn:
        raise AttributeError(
            f"{package} is cpattn's stand-in for CPUs and has no {name}; "
            f"it supplies {', '.join(supplied)}"
        )

    return refuse


class StandIn(AbstractContextManager["StandIn"]):
    """Package of modules that all have the same names, until `remove` or the end of ``with``.

    Parameters
    ----------
    package : str
        Name of the package; an importable package of this name is never replaced.
    submodules : iterable of str
    names : mapping
    """

    def __init__(self, package: str, submodules: Iterable[str], names: Mapping[str, Any]) -> None:
        refuse_to_replace(package)
        self._modules: dict[str, ModuleType] = {}
        root = self._add(package, names)
        root.__path__ = []  # makes it a package
        for submodule in submodules:
            setattr(root, submodule, self._add(f"{package}.{submodule}", names))
        sys.modules.update(self._modules)

    def _add(self, name: str, names: Mapping[str, Any]) -> ModuleType:
        module = ModuleType(name, "Names of this package on the kernels of cpattn.")
        module.__spec__ = ModuleSpec(name, None)
        module.__dict__.update(names)
        self._modules[name] = module
        return module

    def remove(self) -> None:
        """Remove the modules; code that imported from them keeps its names."""
        for name, module in self._modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]

    def __exit__(self, *error: object) -> None:
        self.remove()
