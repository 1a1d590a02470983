# SPDX-License-Identifier: Apache-2.0
"""Methods of single modules of a model, replaced for as long as somebody wants."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

from torch import nn


class Replaced(AbstractContextManager["Replaced"]):
    """Methods of some modules; in place until `remove` or the end of ``with``.

    Copies of a model made meanwhile keep them.

    Parameters
    ----------
    modules : iterable of torch.nn.Module
        Modules whose methods of this name are their classes' until now.
    name : str
    function : callable
        Called as ``function(module, ...)``. The class has the method that it replaces.
    """

    def __init__(
        self, modules: Iterable[nn.Module], name: str, function: Callable[..., Any]
    ) -> None:
        self._modules, self._name = list(modules), name
        for module in self._modules:
            if name in vars(module):
                raise ValueError(
                    f"cpattn.integrations.transformers: {name} of {type(module).__name__} is "
                    "replaced already and must be that of its class"
                )
        for module in self._modules:
            setattr(module, name, MethodType(function, module))

    def remove(self) -> None:
        """Give the modules the methods of their classes again, once."""
        while self._modules:
            vars(self._modules.pop()).pop(self._name, None)

    def __exit__(self, *error: object) -> None:
        self.remove()
