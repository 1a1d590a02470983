# SPDX-License-Identifier: Apache-2.0
"""Temporary replacement of methods of single modules of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

from torch import nn


class Replaced(AbstractContextManager["Replaced"]):
    """Replaced methods of some modules, until `remove` or the end of ``with``.

    Copies of the model made meanwhile keep the replacements.

    Parameters
    ----------
    modules : iterable of torch.nn.Module
        Modules that still have the method of their class.
    name : str
    function : callable
        Called as ``function(module, ...)``; the class's own method stays available.
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
        """Restore the methods of the modules' classes, once."""
        while self._modules:
            vars(self._modules.pop()).pop(self._name, None)

    def __exit__(self, *error: object) -> None:
        self.remove()
