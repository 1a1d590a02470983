# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for modules that a foreign system imports and this environment lacks."""

import abc
import contextlib
import sys
import types
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from torch.overrides import TorchFunctionMode


class _AbsentMeta(abc.ABCMeta):
    """Metaclass by which `Absent` can be a base class, decorator, context or subscripted type."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not Absent:
            return super().__call__(*args, **kwargs)
        decorates = len(args) == 1 and isinstance(args[0], (type, types.FunctionType))
        return args[0] if decorates and not kwargs else Absent

    def __getitem__(cls, key: Any) -> Any:
        return Absent

    def __or__(cls, other: Any) -> Any:
        return Absent

    __ror__ = __or__

    def __bool__(cls) -> bool:
        return False

    def __enter__(cls) -> Any:
        return Absent

    def __exit__(cls, *error: object) -> None:
        pass


class Absent(metaclass=_AbsentMeta):
    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> dict[str, str]:
        """Return a schema, as fields of pydantic models may have such a type."""
        return {"type": "any"}


class _AbsentModule(types.ModuleType):
    __path__: Sequence[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent


class _AbsentLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _FileLoader(SourceLoader):
    """A loader that reads a module from a folder or a wheel."""

    def __init__(self, root: Path | zipfile.Path) -> None:
        self.root = root

    def get_filename(self, fullname: str) -> str:
        """Return a name with the root, so that Python does not mix up lines of two releases."""
        return f"{self.root}/{fullname.replace('.', '/')}.py"

    def get_data(self, path: str | bytes) -> bytes:
        return (self.root / str(path).removeprefix(f"{self.root}/")).read_bytes()


class PackageFinder(MetaPathFinder):
    """First finder: loads some modules of a package, and has stand-ins for its others."""

    def __init__(self, package: str, root: Path | zipfile.Path, names: Iterable[str]) -> None:
        self.package, self.root, self.names = package, root, set(names)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.split(".")[0] != self.package:
            return None
        if fullname in self.names:
            return ModuleSpec(fullname, _FileLoader(self.root))
        return ModuleSpec(fullname, _AbsentLoader(), is_package=True)


class LackingFinder(MetaPathFinder):
    """Last finder: has stand-ins for modules that sglang imports and no finder finds."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not _asked_for_by_sglang():
            return None
        self.found.append(fullname)
        return ModuleSpec(fullname, _AbsentLoader(), is_package=True)


def _asked_for_by_sglang() -> bool:
    """Return whether the running import statement is in a module of sglang."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("importlib"):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith("sglang.")


@contextlib.contextmanager
def stand_ins_for_what_lacks() -> Iterator[None]:
    finder = LackingFinder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in finder.found:  # other code must not take them for the real modules
            sys.modules.pop(name, None)


class DevicesAreTheCpu(TorchFunctionMode):
    """Mode that makes tensors for "cuda" or "npu" on the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") in ("cuda", "npu"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)
