# SPDX-License-Identifier: Apache-2.0
"""Modules under the name of a package that is not installed, for code that imports it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def refuse_to_replace(package: str) -> None:
    """ImportError if there is a package of this name."""
    if package in sys.modules or find_spec(package) is not None:
        raise ImportError(
            f"cpattn.integrations.{package}.install: a package {package} is there already; "
            "it is not replaced"
        )


class StandIn(AbstractContextManager["StandIn"]):
    """A package of modules that all have the same names; in place until `remove` or ``with`` ends.

    Parameters
    ----------
    package : str
        Refused if it can be imported: the real one is never hidden.
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
        """Take the modules away again; those who imported from them keep what they have."""
        for name, module in self._modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]

    def __exit__(self, *error: object) -> None:
        self.remove()
