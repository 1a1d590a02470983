# SPDX-License-Identifier: Apache-2.0
"""Operators of torch for functions of the library, on CPU tensors, without backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

Tensor = torch.Tensor
Function = Callable[..., Any]

_BELOW_AUTOGRAD = torch._C._after_ADInplaceOrView_keyset
_CPU = torch._C.DispatchKey.CPU


# Scales of caches: a schema has no argument that is either a number or a tensor.
SCALES = (
    "float? k_scale=None, float? v_scale=None, Tensor? k_scales=None, Tensor? v_scales=None, "
    "str? kv_dtype=None"
)


def with_scales(function: str, options: dict[str, Any]) -> dict[str, Any]:
    """Convert operator options to those of the function, whose scales may be tensors."""
    for name in ("k_scale", "v_scale"):
        tensor = options.pop(f"{name}s", None)
        if tensor is not None:
            if options.get(name) is not None:
                raise ValueError(f"{function}: {name}s must not be given beside {name}")
            options[name] = tensor
    return options


class Operators:
    """Operators of one namespace, ``torch.ops.<namespace>``, until the process ends.

    They are registered directly, as `torch.library.custom_op` costs 12 µs per call instead of 3.
    """

    _libraries: ClassVar[list[torch.library.Library]] = []  # their end would remove the operators

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._library = torch.library.Library(namespace, "FRAGMENT")
        self._libraries.append(self._library)

    def define(self, schema: str, function: Function, fake: Function) -> Any:
        """Register an operator: its kernel and, for tracing, the shapes of its results."""
        name = self._declare(schema)
        self._library.impl(name, function, "CPU")
        torch.library.register_fake(f"{self._namespace}::{name}", fake, lib=self._library)
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops, self._namespace), packet)
        operator = getattr(operator, overload or "default")
        kernel = _without_backward(operator, function)
        self._library.impl(name, kernel, "AutogradCPU", with_keyset=True)
        return operator

    def define_composite(self, schema: str, function: Function) -> None:
        """Register an operator of others, which torch traces and differentiates instead."""
        self._library.impl(self._declare(schema), function, "CompositeImplicitAutograd")

    def define_with_out(
        self, arguments: str, results: str, function: Function, write: Function, fake: Function
    ) -> None:
        """Register ``function(arguments)`` with tensors named `results`, and an overload ``.out``.

        `write` takes the arguments of `function`, and the result tensors as keywords.
        """
        names = results.split()
        returns = ", ".join(f"Tensor {name}" for name in names)
        self.define(f"{arguments} -> ({returns})", function, fake)
        outputs = ", ".join(
            f"Tensor({letter}!) {name}" for letter, name in zip("abcd", names, strict=False)
        )
        name, head = arguments.rstrip(")").split("(", 1)
        separator = ", " if "*" in head else ", *, "
        schema = f"{name}.out({head}{separator}{outputs}) -> ()"
        self.define(schema, write, lambda *args, **kwargs: None)

    def _declare(self, schema: str) -> str:
        self._library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        return schema[: schema.index("(")]


def _without_backward(operator: Any, function: Function) -> Function:
    """Return the function for calls outside of inference mode: no gradients, new versions.

    Versions tell autograd that a saved tensor was overwritten. Usually the kernel is next and is
    called directly; dispatch through torch would cost half a call more.
    """
    arguments = operator._schema.arguments
    written = [
        (position, argument.name)
        for position, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]

    def call(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor) and value.requires_grad:
                    raise TypeError(message(value, args, kwargs))
        below = keyset & _BELOW_AUTOGRAD
        if below.highestPriorityTypeId() == _CPU:
            result = function(*args, **kwargs)
        else:  # a graph is being traced, or a tensor is a negated view
            result = operator.redispatch(below, *args, **kwargs)
        for position, name in written:
            tensors = args[position] if position < len(args) else kwargs[name]
            torch.autograd.graph.increment_version(tensors)
        return result

    def message(value: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        given = {argument.name: x for argument, x in zip(arguments, args, strict=False)} | kwargs
        name = next(name for name, x in given.items() if x is value)
        return (
            f"{operator._schema.name.partition('::')[2]}: cpattn operators have no backward: "
            f"{name} requires a gradient; call it under torch.no_grad() or pass {name}.detach()"
        )

    return call
