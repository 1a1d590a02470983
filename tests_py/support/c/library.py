# SPDX-License-Identifier: Apache-2.0
"""Interface of Python to libcpattn of this build: structs and functions of its header."""

import ctypes
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cpattn
from support.places import ROOT

FOLDER = ROOT / "cpp" / "c"
HEADER = FOLDER / "include" / "cpattn.h"
TEXT = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)

SCALARS: dict[str, Any] = {
    "size_t": ctypes.c_size_t, "int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32,
    "uint64_t": ctypes.c_uint64, "uint16_t": ctypes.c_uint16, "uint8_t": ctypes.c_uint8,
    "double": ctypes.c_double,
}  # fmt: skip
CODES = {
    np.dtype(dtype): (code, bits)
    for code, bits, dtype in [
        (0, 8, np.int8), (0, 32, np.int32), (0, 64, np.int64), (1, 8, np.uint8),
        (1, 16, np.uint16), (2, 16, np.float16), (2, 32, np.float32), (2, 64, np.float64),
        (4, 16, ml_dtypes.bfloat16), (6, 8, np.bool_), (10, 8, ml_dtypes.float8_e4m3fn),
        (12, 8, ml_dtypes.float8_e5m2),
    ]
}  # fmt: skip


def build_folder() -> Path:
    """Return the build folder of the running package; skip the test if it has no libcpattn."""
    folder = Path(cpattn._core.__file__).parents[2] / "cpp" / "c"
    if not (folder / "libcpattn.so").exists():
        pytest.skip("this build has no libcpattn")
    return folder


def _type_of(declared: str) -> Any:
    if "*" not in declared:
        return SCALARS[declared]
    return ctypes.c_char_p if declared.replace(" ", "") == "constchar*" else ctypes.c_void_p


def _struct(name: str, body: str) -> type[ctypes.Structure]:
    fields = re.findall(r"^\s*(\w.*?)\s*\b(\w+);", body, re.MULTILINE)
    return type(name, (ctypes.Structure,), {"_fields_": [(f, _type_of(t)) for t, f in fields]})


STRUCTS: Mapping[str, type[ctypes.Structure]] = {
    name: _struct(name, body)
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\}", TEXT, re.DOTALL)
}
FUNCTIONS = sorted(re.findall(r"^CPATTN_API [\w\s*]+?(\w+)\(", TEXT, re.MULTILINE))


@functools.cache
def load() -> ctypes.CDLL:
    library = ctypes.CDLL(build_folder() / "libcpattn.so")
    for name in ("cpattn_version", "cpattn_last_error"):
        getattr(library, name).restype = ctypes.c_char_p
    return library


class CallFailed(Exception):
    """Failure of a call, with its message and status."""


def call(name: str, *arguments: Any) -> None:
    status = getattr(load(), f"cpattn_{name}")(*arguments)
    if status != 0:
        raise CallFailed(load().cpattn_last_error().decode(), status)


def defaults(struct: str) -> ctypes.Structure:
    """Return a struct filled by its _init function."""
    filled = STRUCTS[f"cpattn_{struct}"]()
    call(f"{struct}_init", ctypes.byref(filled), ctypes.c_size_t(ctypes.sizeof(filled)))
    return filled


class Given:
    """Arguments in the form of C; all of them live as long as this object."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def keep(self, x: Any) -> Any:
        self._kept.append(x)
        return x

    def tensor(self, array: np.ndarray) -> int:
        """Return the address of a description of the array."""
        array = self.keep(array)
        code, bits = CODES[array.dtype]
        extents = ctypes.c_int64 * array.ndim
        tensor = self.keep(STRUCTS["cpattn_tensor"]())
        shape = self.keep(extents(*array.shape))
        strides = self.keep(extents(*(x // array.itemsize for x in array.strides)))
        tensor.data, tensor.device_type, tensor.ndim = array.ctypes.data, 1, array.ndim
        tensor.code, tensor.bits, tensor.lanes = code, bits, 1
        tensor.shape, tensor.strides = ctypes.addressof(shape), ctypes.addressof(strides)
        return ctypes.addressof(tensor)

    def tensors(self, arrays: list[np.ndarray]) -> int:
        pointers = (ctypes.c_void_p * len(arrays))(*map(self.tensor, arrays))
        return ctypes.addressof(self.keep(pointers))

    def options(self, struct: str, **options: Any) -> Any:
        """Return a reference to a struct with these options; unknown options are errors."""
        filled = self.keep(defaults(struct))
        types = dict(type(filled)._fields_)
        for name, value in options.items():
            if types[name] is ctypes.c_char_p:
                value = None if value is None else self.keep(value.encode())
            elif name == "scale" and isinstance(value, float):
                value = ctypes.addressof(self.keep(ctypes.c_double(value)))
            elif (
                types[name] is ctypes.c_void_p and value is not None and not isinstance(value, int)
            ):
                value = self.tensor(np.asarray(value))
            setattr(filled, name, value)
        filled.given = self
        return ctypes.byref(filled)
