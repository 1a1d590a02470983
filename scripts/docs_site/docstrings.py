# SPDX-License-Identifier: Apache-2.0
"""What griffe cannot read in the sources: docstrings of the core, and links between names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import griffe

#: A name, or a call of it, between single backticks.
NAME = re.compile(r"(?<![`\[])`(?:cpattn\.)?([A-Za-z_][\w.]*)(\(\))?`(?!`)")

#: Members that Python calls; a class and its `__init__` are described together.
SPECIAL = "__(?!init__).*__"


def objects_of(parent: griffe.Object) -> Iterator[griffe.Object]:
    """All objects that are defined in another, with itself."""
    yield parent
    for member in parent.members.values():
        if isinstance(member, griffe.Object):
            yield from objects_of(member)


def modules_of(parent: griffe.Module) -> Iterator[griffe.Module]:
    """A package and all modules in it."""
    return (found for found in objects_of(parent) if isinstance(found, griffe.Module))


def is_name_of_core(member: griffe.Object | griffe.Alias) -> bool:
    """Whether a module only says that one of its names is that of the core.

    It may have a subclass besides, for type checkers alone.
    """
    name = f"_core.{member.name}"
    if isinstance(member, griffe.Class) and member.docstring is None:
        return [str(base) for base in member.bases] == [name]
    return isinstance(member, griffe.Attribute) and str(member.value) == name


def public_names(package: griffe.Module) -> dict[str, str]:
    """Where the reference has each public name: those of `cpattn` come before those of rooms."""
    found: dict[str, str] = {}
    for module in (package, *package.modules.values()):
        for name in module.exports or ():
            short = name if isinstance(name, str) else name.name
            if isinstance(module.members.get(short), griffe.Module):
                continue
            found.setdefault(short, f"{module.path}.{short}")
            found.setdefault(f"{module.name}.{short}", f"{module.path}.{short}")
    return found


class Docstrings(griffe.Extension):
    """Completes objects and docstrings as soon as the package has been read."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        if pkg.name != "cpattn":
            return
        self.parsing: dict[str, Any] = {
            "parser": loader.docstring_parser,
            "parser_options": loader.docstring_options,
        }
        core = pkg["_core"]
        for module in [*modules_of(pkg)]:
            if module is core:
                continue
            for name, member in [*module.members.items()]:
                if is_name_of_core(member):
                    module.set_member(
                        name, griffe.Alias(name, f"{core.path}.{name}", parent=module)
                    )
        for name, member in core.members.items():
            if isinstance(member, griffe.Object) and not name.startswith("_"):
                self.complete(member, getattr(import_module(core.path), name, None))
        names = public_names(pkg)
        for object in [*objects_of(pkg)]:
            if object.docstring:
                self.link(object, names)
            elif isinstance(object.parent, griffe.Class) and re.fullmatch(SPECIAL, object.name):
                object.parent.del_member(object.name)  # what every class has

    def complete(self, object: griffe.Object, live: Any) -> None:
        """Add what the compiled object knows of itself, as stubs have no docstrings."""
        text = re.sub(r"\A\w+\(.*\) -> .*\n+", "", (inspect.getdoc(live) or "").strip())
        if text and object.docstring is None:
            object.docstring = griffe.Docstring(
                text, parent=object, lineno=object.lineno, **self.parsing
            )
        if not isinstance(object, griffe.Class):
            return
        object.bases = [base for base in object.bases if not str(base).startswith("_")]
        for name, member in object.members.items():
            if isinstance(member, griffe.Object) and not name.startswith("_"):
                self.complete(member, getattr(live, name, None))
        for name, value in vars(live).items():
            if inspect.isfunction(value) and name not in object.members:
                path = f"{value.__module__}.{value.__qualname__}"
                object.set_member(name, griffe.Alias(name, path, parent=object))

    def link(self, object: griffe.Object, names: dict[str, str]) -> None:
        siblings: dict[str, str] = {}
        parent = object if isinstance(object, griffe.Class) else object.parent
        if isinstance(parent, griffe.Class) and parent.name in names:
            siblings = {name: f"{names[parent.name]}.{name}" for name in parent.members}

        def linked(match: re.Match[str]) -> str:
            target = siblings.get(match[1]) or names.get(match[1])
            if target is None and "." in match[1]:
                owner, _, member = match[1].rpartition(".")
                target = f"{names[owner]}.{member}" if owner in names else None
            if target is None or target.endswith(f".{object.name}"):
                return match[0]
            return f"[{match[0]}][{target}]"

        lines = object.docstring.value.splitlines()
        object.docstring.value = "\n".join(
            line if re.match(r"\s*(>>>|\.\.\.)", line) else NAME.sub(linked, line) for line in lines
        )
