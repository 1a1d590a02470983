# SPDX-License-Identifier: Apache-2.0
"""Messages between servers that plan a transfer, in the byte formats of current engines.

A message is a list of frames, sent as one ZeroMQ multipart message. Decode sends prefill a
`KVRegistration` once, and a `KVTransferRequest` for each prompt. Numbers are decimal ASCII; arrays
are little-endian, without a header; `pack_int_lists` packs lists of lists.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from .._arguments import items, shown_list
from .._types import AnyTensor

WIDTHS = {"I": 4, "i": 4, "Q": 8}
NO_PAGES = partial(np.empty, 0, np.int32)

IntLists = Sequence[Sequence[int]]


def pack_int_lists(lists: IntLists, fmt: str) -> bytes:
    """Pack lists of integers as one frame of sglang 0.5.23.

    The frame, little-endian, has the number of lists, the bytes of each as u32, then the integers.

    Parameters
    ----------
    lists : sequence of sequences of int
        Lists to pack. An empty sequence gives an empty frame.
    fmt : str
        Format of the integers, as in `struct`: "I", "i" or "Q".

    Returns
    -------
    bytes

    Raises
    ------
    TypeError, ValueError
        If an element of `lists` is no list, `fmt` is unknown, or an integer does not fit it.

    Examples
    --------
    >>> pack_int_lists([[7], []], "i").hex(" ", 4)
    '02000000 04000000 00000000 07000000'
    >>> unpack_int_lists(pack_int_lists([[7], []], "i"), "i")
    [[7], []]
    """
    _check_format("pack_int_lists", fmt)
    bodies = [
        _pack_ints(fmt, values, f"pack_int_lists: list {i} ")
        for i, values in enumerate(items(lists, "pack_int_lists", "lists"))
    ]
    sizes = struct.pack(f"<{len(bodies) + 1}I", len(bodies), *map(len, bodies))
    return sizes + b"".join(bodies) if bodies else b""


def unpack_int_lists(buf: bytes, fmt: str) -> list[list[int]]:
    """Unpack the lists of a frame of `pack_int_lists`.

    Parameters
    ----------
    buf : bytes
        Frame to unpack; an empty frame has no lists.
    fmt : str
        Format of the integers when they were packed.

    Returns
    -------
    list of lists of int

    Raises
    ------
    TypeError, ValueError
        If `buf` is no bytes, `fmt` is unknown, or the frame is longer or shorter than its lists.

    Examples
    --------
    >>> unpack_int_lists(bytes.fromhex("01000000 08000000 07000000 09000000"), "I")
    [[7, 9]]
    """
    _check_format("unpack_int_lists", fmt)
    if not isinstance(buf, (bytes, bytearray, memoryview)):
        raise TypeError(f"unpack_int_lists: buf must be bytes, got {type(buf).__name__}")
    buf = bytes(buf)
    if not buf:
        return []
    num_lists = int.from_bytes(buf[:4], "little")
    begin = 4 * (1 + num_lists)
    sizes = np.frombuffer(buf[4:begin] if begin <= len(buf) else b"", "<u4")
    if (end := begin + int(sizes.sum(dtype=np.int64))) != len(buf):
        raise ValueError(
            f"unpack_int_lists: the sizes of {num_lists} lists must end at byte {begin} and the "
            f"lists with the frame, got {end} bytes in a frame of {len(buf)}"
        )
    if (broken := np.flatnonzero(sizes % WIDTHS[fmt])).size:
        _unpack_ints(fmt, bytes(sizes[broken[0]]), f"unpack_int_lists: list {broken[0]} ")
    # All integers at once: a frame may have millions of empty lists.
    ints = _unpack_ints(fmt, buf[begin:])
    ends = (sizes.cumsum(dtype=np.int64) // WIDTHS[fmt]).tolist()
    return [ints[begin:end] for begin, end in pairwise([0, *ends])]


def _check_format(function: str, fmt: str) -> None:
    if not isinstance(fmt, str) or fmt not in WIDTHS:
        kind = ValueError if isinstance(fmt, str) else TypeError
        raise kind(f"{function}: fmt must be one of {', '.join(WIDTHS)}, got {fmt!r:.40}")


def _pack_ints(fmt: str, values: Sequence[int], name: str = "") -> bytes:
    try:
        return struct.pack(f"<{len(values)}{fmt}", *values)
    except (struct.error, OverflowError) as error:
        raise ValueError(f"{name}must be integers of format {fmt!r}: {error}") from None
    except Exception as error:
        raise TypeError(
            f"{name}must be integers of format {fmt!r}, got {type(values).__name__}"
        ) from error


def _unpack_ints(fmt: str, body: bytes, name: str = "") -> list[int]:
    num, rest = divmod(len(body), WIDTHS[fmt])
    if rest:
        raise ValueError(f"{name}must hold integers of {WIDTHS[fmt]} bytes, got {len(body)} bytes")
    return list(struct.unpack(f"<{num}{fmt}", body))


def _pack_pages(values: Any) -> bytes:
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError("must be int32 of shape [n], got a masked array")
    pages = np.asarray(values)
    if pages.ndim != 1 or (pages.size and pages.dtype.kind not in "iu"):
        raise ValueError(f"must be int32 of shape [n], got {pages.dtype} of shape {pages.shape}")
    narrow = pages.astype("<i4")
    if (wide := np.flatnonzero(narrow != pages)).size:
        raise ValueError(f"must fit into int32, got {pages[wide[0]]} at {wide[0]}")
    return narrow.tobytes()


def _unpack_pages(frame: bytes) -> NDArray[np.int32]:
    if len(frame) % 4:
        raise ValueError(f"must hold integers of 4 bytes, got {len(frame)} bytes")
    return np.frombuffer(frame, "<i4")


def _pack_number(value: int) -> bytes:
    if operator.index(value) < 0:
        raise ValueError(f"must be >= 0, got {value}")
    return b"%d" % value


def _unpack_number(frame: bytes) -> int:
    if not frame.isdigit():
        raise ValueError(f"must be a decimal number, got {frame!r}")
    return int(frame)


Codec = Mapping[str, Callable[[Any], Any]]  # "pack" and "unpack" of a field's metadata

TEXT: Codec = {
    "pack": lambda text: text.encode("ascii"),
    "unpack": lambda frame: frame.decode("ascii"),
}
NUMBER: Codec = {"pack": _pack_number, "unpack": _unpack_number}
PAGES: Codec = {"pack": _pack_pages, "unpack": _unpack_pages}
ADDRESS: Codec = {
    "pack": lambda address: _pack_ints("Q", [address]),
    "unpack": lambda frame: struct.unpack("<Q", frame)[0],
}


def _ints(fmt: str) -> Codec:
    return {"pack": partial(_pack_ints, fmt), "unpack": partial(_unpack_ints, fmt)}


def _lists(fmt: str) -> Codec:
    return {"pack": partial(pack_int_lists, fmt=fmt), "unpack": partial(unpack_int_lists, fmt=fmt)}


M = TypeVar("M", bound="_Message")


class _Message:
    """Dataclass whose fields are the frames after `_HEAD`, in order.

    An empty frame stands for the default of its field, if any; None is written as an empty frame.
    """

    _HEAD: ClassVar[list[bytes]] = []

    def to_frames(self) -> list[bytes]:
        """Return the frames, in the number and order of sglang 0.5.23.

        TypeError or ValueError names a field with a value of another type or out of range.
        """
        return self._HEAD + [self._pack(item) for item in fields(self)]  # type: ignore[arg-type]

    @classmethod
    def from_frames(cls: type[M], frames: Sequence[bytes]) -> M:
        """Read a message from frames; frames that older servers do not send have defaults.

        Extra frames of newer servers are ignored. A missing or malformed frame raises ValueError,
        an element that is no bytes TypeError.
        """
        known: tuple[Field[Any], ...] = fields(cls)  # type: ignore[arg-type]
        given = items(frames, f"{cls.__name__}.from_frames", "frames")
        frames = [_bytes_of(cls.__name__, i, frame) for i, frame in enumerate(given)]
        first = len(cls._HEAD)
        needed = first + max(i for i, item in enumerate(known, 1) if not _has_default(item))
        if len(frames) < needed or list(frames[:first]) != cls._HEAD:
            raise ValueError(
                f"{cls.__name__}.from_frames: frames must be at least {needed} and start with "
                f"{cls._HEAD}, got {len(frames)} that start with {list(frames[:1])}"
            )
        values = {}
        for i, (item, frame) in enumerate(zip(known, frames[first:], strict=False), first):
            if frame or not _has_default(item):
                try:
                    values[item.name] = item.metadata["unpack"](frame)
                except (ValueError, struct.error) as error:
                    raise ValueError(
                        f"{cls.__name__}.from_frames: frame {i} ({item.name}): {error}"
                    ) from None
        return cls(**values)

    def _pack(self, item: Field[Any]) -> bytes:
        value = getattr(self, item.name)
        try:
            absent = value is None and item.default is None
            return b"" if absent else item.metadata["pack"](value)
        except (ValueError, TypeError, AttributeError) as error:
            kind = ValueError if isinstance(error, ValueError) else TypeError
            name = f"{type(self).__name__}.to_frames"
            raise kind(f"{name}: {item.name}: {error}") from None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return NotImplemented
        return self.to_frames() == other.to_frames()

    def __repr__(self) -> str:
        items = (f"{item.name}={shown_list(getattr(self, item.name))}" for item in fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(items)})"


def _bytes_of(message: str, i: int, frame: Any) -> bytes:
    if not isinstance(frame, (bytes, bytearray, memoryview)):
        raise TypeError(
            f"{message}.from_frames: frame {i} must be bytes, got {type(frame).__name__}"
        )
    return bytes(frame)


def _has_default(item: Field[Any]) -> bool:
    return item.default is not MISSING or item.default_factory is not MISSING


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class KVRegistration(_Message):
    """Message of a decode process, sent once to each prefill process, about its buffers.

    Parameters
    ----------
    host, port : str and int
        Address at which the decode process listens for messages.
    session_id : str
        Session of the engine that registered the buffers.
    kv_data_ptrs, aux_data_ptrs, state_data_ptrs, engine_rank
        See `cpattn.transfer.sglang_0_5_23.KVArgs`; empty buffers are included, as peers pair by
        position.
    attn_tp_size : int
        Size of the attention group.
    kv_item_len : int
        Bytes of a page of the first KV buffer, 0 if there is none. `kv_item_lens` has all.
    state_item_lens, state_dim_per_tensor : lists of lists of int
        Parallel to ``state_data_ptrs``.
    kv_layer_ids, state_layer_ids : list of int, and list of lists of int
        Layers of the buffers, empty if their order determines them.
    staging_ptr, staging_bytes : int or None
        Buffer in which to gather heads, for ranks that hold different heads.
    dcp_size, dcp_rank : int
        Size of the decode context-parallel group, and rank in it.
    staging_layer_ids : list of int
        Layers of the slots of the staging buffer.
    kv_item_lens : list of int
        Bytes of a page of each KV buffer.

    Examples
    --------
    >>> message = KVRegistration(
    ...     host="10.0.0.2", port=4000, session_id="10.0.0.2:4001", kv_data_ptrs=[4096],
    ...     aux_data_ptrs=[], state_data_ptrs=[], engine_rank=0, attn_tp_size=1, kv_item_len=512,
    ... )
    >>> frames = message.to_frames()
    >>> len(frames), frames[:4]
    (20, [b'None', b'10.0.0.2', b'4000', b'10.0.0.2:4001'])
    >>> KVRegistration.from_frames(frames) == message
    True
    """

    _HEAD: ClassVar[list[bytes]] = [b"None"]  # instead of a room

    host: str = field(metadata=TEXT)
    port: int = field(metadata=NUMBER)
    session_id: str = field(metadata=TEXT)
    kv_data_ptrs: Sequence[int] = field(metadata=_ints("Q"))
    aux_data_ptrs: Sequence[int] = field(metadata=_ints("Q"))
    state_data_ptrs: IntLists = field(metadata=_lists("Q"))
    engine_rank: int = field(metadata=NUMBER)
    attn_tp_size: int = field(metadata=NUMBER)
    kv_item_len: int = field(metadata=NUMBER)
    state_item_lens: IntLists = field(metadata=_lists("I"), default_factory=list)
    state_dim_per_tensor: IntLists = field(metadata=_lists("I"), default_factory=list)
    kv_layer_ids: Sequence[int] = field(metadata=_ints("I"), default_factory=list)
    state_layer_ids: IntLists = field(metadata=_lists("I"), default_factory=list)
    staging_ptr: int | None = field(metadata=ADDRESS, default=None)
    staging_bytes: int | None = field(metadata=NUMBER, default=None)
    dcp_size: int = field(metadata=NUMBER, default=1)
    dcp_rank: int = field(metadata=NUMBER, default=0)
    staging_layer_ids: Sequence[int] = field(metadata=_ints("Q"), default_factory=list)
    kv_item_lens: Sequence[int] = field(metadata=_ints("Q"), default_factory=list)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class KVTransferRequest(_Message):
    """Message of a decode process that requests the KV of one prompt.

    Parameters
    ----------
    room : int
        Number of the prompt, known to both servers.
    host, port, session_id
        Values of the earlier `KVRegistration`.
    page_indices : ints [num_pages]
        Pages for the tokens after ``decode_prefix_len``, in order; may be empty.
    aux_index : int or None
        Row of the aux buffers. None makes the message a dummy of a process that only has to be
        counted: pages and state indices must then be empty, else ValueError.
    state_indices : lists of ints
        Indices for each component of state.
    required_count : int
        Number of processes whose requests prefill awaits before it sends.
    decode_prefix_len : int
        Leading tokens that decode has already.
    device_page_indices : ints
        Pages on the device, if `page_indices` are of other memory.

    Examples
    --------
    >>> request = KVTransferRequest(
    ...     room=5, host="10.0.0.1", port=4000, session_id="10.0.0.1:4001",
    ...     aux_index=0, required_count=1,
    ... )
    >>> request.to_frames()
    [b'5', b'10.0.0.1', b'4000', b'10.0.0.1:4001', b'', b'0', b'', b'1', b'0', b'']
    >>> KVTransferRequest.from_frames(request.to_frames()) == request
    True
    """

    room: int = field(metadata=NUMBER)
    host: str = field(metadata=TEXT)
    port: int = field(metadata=NUMBER)
    session_id: str = field(metadata=TEXT)
    page_indices: Sequence[int] | AnyTensor = field(metadata=PAGES, default_factory=NO_PAGES)
    aux_index: int | None = field(metadata=NUMBER, default=None)
    state_indices: IntLists = field(metadata=_lists("i"), default_factory=list)
    required_count: int = field(metadata=NUMBER)
    decode_prefix_len: int = field(metadata=NUMBER, default=0)
    device_page_indices: Sequence[int] | AnyTensor = field(metadata=PAGES, default_factory=NO_PAGES)

    def __post_init__(self) -> None:
        lists = (self.page_indices, self.state_indices, self.device_page_indices)
        if self.is_dummy and any(len(items) for items in lists):
            raise ValueError(
                f"KVTransferRequest: aux_index must be given with pages or state, got None and "
                f"{len(self.page_indices)} pages, {len(self.state_indices)} lists of state, "
                f"{len(self.device_page_indices)} pages of the device"
            )

    @property
    def is_dummy(self) -> bool:
        """Tell whether nothing is to be sent, not even metadata."""
        return self.aux_index is None
