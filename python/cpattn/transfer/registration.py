# SPDX-License-Identifier: Apache-2.0
"""Memory registered with an engine: recorded, kept alive, and released."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from typing import Any, NoReturn

import numpy as np

from .._arguments import count, has, part
from .._containers import torch_of
from .engine import TransferEngine, TransferError, TransferStatus, checked_code
from .layout import KVLayout
from .regions import registration_regions

# Owners of registered memory, by engine and registration. An ended engine has no entry.
_held: dict[int, dict[int, tuple[object, ...]]] = {}
_numbers = itertools.count(1)


def register(engine: TransferEngine, *what: Any) -> Registration:
    """Let peers of an engine write into memory, or send from it: all of it, or none.

    Parameters
    ----------
    engine : TransferEngine
    *what : KVLayout, pool or tensor
        A layout stands for all its buffers, and so does a pool (``MHATokenToKVPool``,
        ``MLATokenToKVPool`` or any object with ``get_contiguous_buf_infos()``). Tensors must be
        contiguous, writable, and of torch or NumPy. Memory that comes twice is registered once, and
        empty buffers are left out (`cpattn.transfer.registration_regions`).

    Returns
    -------
    Registration
        Context manager whose exit, like its ``close()``, ends the registration. Without a reference
        to it, the registration lasts until the engine ends, as servers register for their lifetime.
        While it lasts, it keeps `what` alive.

    Raises
    ------
    TransferError
        If the engine returns a failure code, the error's ``status``.
    TypeError, ValueError
        If an argument has another type, or a tensor is not contiguous or not writable.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> pool = cpattn.kv.MHATokenToKVPool(
    ...     size=64, page_size=8, num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32")
    >>> metadata = np.zeros((4, 64), np.uint8)
    >>> engine = cpattn.transfer.LocalEngine()
    >>> with cpattn.transfer.register(engine, pool, metadata) as registration:
    ...     print(registration)
    Registration(5 ranges, 18688 bytes)
    >>> registration.close()  # a second time does nothing
    >>> engine.close()
    """
    infos = [infos_of(item) for item in what]
    addrs = [addr for item, _ in infos for addr in item]
    sizes = [size for _, item in infos for size in item]
    return Registration(engine, *registration_regions(addrs, sizes), what)


class Registration:
    """Memory that peers of an engine may write to, until `close` or the end of the engine.

    `cpattn.transfer.register` makes registrations and checks its arguments. As a context manager,
    the registration ends with its block.

    Parameters
    ----------
    engine : TransferEngine
        Engine that registers the ranges.
    addrs, sizes : lists of int
        Address and bytes of the ranges.
    owners : tuple of objects
        Objects that own the memory; kept alive while the registration lasts.

    Attributes
    ----------
    engine : TransferEngine
    addrs, sizes : tuple of int
        Ranges as registered with the engine.

    Raises
    ------
    TransferError
        If the engine returns a failure code.

    Examples
    --------
    >>> import numpy as np
    >>> from cpattn.transfer import LocalEngine, register
    >>> pages = np.zeros((4, 128), np.uint8)
    >>> with LocalEngine() as engine, register(engine, pages) as registration:
    ...     print(registration, registration.sizes)
    Registration(1 range, 512 bytes) (512,)
    """

    def __init__(
        self, engine: TransferEngine, addrs: list[int], sizes: list[int], owners: tuple[object, ...]
    ) -> None:
        enroll = part(engine, "register", "register", "engine")
        self.engine = engine
        self.addrs = tuple(addrs)
        self.sizes = tuple(sizes)
        self._lock = threading.Lock()
        self._number = next(_numbers)
        _hold(engine, self._number, owners)  # before a peer can write to it
        try:
            code = checked_code("register", enroll(addrs, sizes)) if addrs else 0
            if code:
                raise TransferError(
                    f"register: the engine refused {self._what()} with code {code}",
                    TransferStatus(code),
                )
        except BaseException:
            _release(engine, self._number)
            raise

    def close(self) -> None:
        """End the registration, and release the memory.

        On a failure code of the engine, the call raises TransferError and keeps the memory, which
        may still be registered. It does nothing if the registration has ended, as by its engine.
        """
        with self._lock:
            if self._number not in _held.get(id(self.engine), ()):
                return
            unregister = self.engine.unregister
            code = checked_code("unregister", unregister(list(self.addrs))) if self.addrs else 0
            if code:
                raise TransferError(
                    f"Registration.close: the engine refused to give back {self._what()} with "
                    f"code {code}",
                    TransferStatus(code),
                )
            _release(self.engine, self._number)

    def _what(self) -> str:
        return f"{count(len(self.addrs), 'range')}, {count(sum(self.sizes), 'byte')}"

    def __repr__(self) -> str:
        return f"Registration({self._what()})"

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("Registration: memory of this process cannot be pickled or copied")


def infos_of(item: Any) -> tuple[list[int], list[int]]:
    """Return addresses and bytes of the buffers of an argument of `register`."""
    if isinstance(item, KVLayout):
        entries = item.entries
        return [entry.addr for entry in entries], [entry.nbytes for entry in entries]
    if has(item, "get_contiguous_buf_infos"):
        addrs, sizes, *_ = item.get_contiguous_buf_infos()
        return list(addrs), list(sizes)
    torch = torch_of(item)
    if torch is not None:
        if item.layout is not torch.strided or not item.is_contiguous():
            raise ValueError(
                f"register: a tensor must be contiguous, got one of {item.layout}, shape "
                f"{list(item.shape)}"
            )
        return [item.data_ptr()], [item.numel() * item.element_size()]
    if isinstance(item, np.ndarray) and not isinstance(item, np.ma.MaskedArray):
        if not item.flags.c_contiguous:
            raise ValueError(
                f"register: an array must be contiguous, got shape {list(item.shape)} with "
                f"strides {list(item.strides)}"
            )
        if not item.flags.writeable:
            raise ValueError("register: an array must be writeable, got a read-only one")
        return [item.ctypes.data], [item.nbytes]
    raise TypeError(
        "register: every argument must be a KVLayout, a KV pool, or a tensor of torch or NumPy, "
        f"got {type(item).__name__}"
    )


def forget(engine: object) -> None:
    """Release all memory registered with an engine that has ended."""
    _held.pop(id(engine), None)


def _hold(engine: object, number: int, owners: tuple[object, ...]) -> None:
    key, new = id(engine), dict[int, tuple[object, ...]]()
    if _held.setdefault(key, new) is new:  # of several threads, the first
        with contextlib.suppress(TypeError):  # class whose end is not observed: until `close`
            weakref.finalize(engine, _held.pop, key, None).atexit = False
    _held[key][number] = owners


def _release(engine: object, number: int) -> None:
    _held.get(id(engine), {}).pop(number, None)
