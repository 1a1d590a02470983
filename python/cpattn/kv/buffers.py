# SPDX-License-Identifier: Apache-2.0
"""Buffers of the layers of all KV pools, and checks of the pools' options."""

from __future__ import annotations

import math
import os
from importlib.util import find_spec
from typing import Any, NamedTuple, NoReturn

from .. import _core
from .._arguments import at_least, has, integer
from .._containers import numpy_dtype
from .._types import AnyTensor, Indices, Tensor

_FLAGS = {
    **dict.fromkeys(("1", "true", "yes", "y", "on"), True),
    **dict.fromkeys(("", "0", "false", "no", "n", "off"), False),
}

BufInfos = tuple[list[int], list[int], list[int]]

CODES = ("float8_e4m3fn", "float8_e5m2", "int8")
NUMBERS = ("float32", "float16", "bfloat16")
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}  # 1 for others


class Rows(NamedTuple):
    """Shape, dtype and format of one row of a kind.

    `in_pages` tells that a page has more than its concatenated rows. `format` must be the same at
    peers of a transfer; default: the dtype.
    """

    shape: tuple[int, ...]
    dtype: str
    in_pages: bool = False
    format: str | None = None


class BufferShape(NamedTuple):
    """Sizes of the buffer of one kind."""

    num_layers: int
    num_slots: int
    row_elements: int
    dtype: str

    @property
    def layer_bytes(self) -> int:
        return self.num_slots * self.row_elements * _ITEM_BYTES.get(self.dtype, 1)

    @property
    def num_bytes(self) -> int:
        return self.num_layers * self.layer_bytes


class Memory:
    """Private memory of this process for the buffers of pools.

    `NumaMemory` places buffers on chosen NUMA nodes; `cpattn.distributed.SharedMemory` places them
    in memory that the ranks of a host share.
    """

    def _make_buffers(
        self, function: str, shapes: dict[str, BufferShape]
    ) -> dict[str, _core.KVBuffer]:
        """Make a buffer of zeros for each kind; errors name `function`."""
        return {kind: _core.KVBuffer(function, *shape) for kind, shape in shapes.items()}


class KVPool:
    """Buffers of several kinds with one row per layer, token slot and kind.

    `dtype` is the dtype of the pool as a whole; `rows` describes a row of each kind.
    """

    num_kv_heads: int

    def __init__(
        self,
        rows: dict[str, Rows],
        size: int,
        page_size: int,
        num_layers: int,
        dtype: str,
        start_layer: int,
        use_fia: bool,
        container: str | None,
        memory: Memory | None,
    ):
        function = type(self).__name__
        self.size = at_least(0, size, function, "size")
        self.page_size = at_least(1, page_size, function, "page_size")
        self.num_pages = self.size // self.page_size + 1
        self.num_layers = self.layer_num = at_least(1, num_layers, function, "num_layers")
        self.start_layer = at_least(0, start_layer, function, "start_layer")
        self.end_layer = self.start_layer + self.num_layers
        self.dtype = dtype
        self.store_dtype = _store_dtype(rows["k"].dtype)
        self.use_fia = use_fia
        self.kinds = tuple(rows)
        self.dtypes = {kind: row.format or row.dtype for kind, row in rows.items()}
        self.whole_page_kinds = tuple(kind for kind, row in rows.items() if row.in_pages)
        slots = self.num_pages * self.page_size
        view = _viewer(function, container)
        if memory is None:
            memory = Memory()
        elif not issubclass(type(memory), Memory):
            raise TypeError(
                f"{function}: memory must be a NumaMemory, a SharedMemory or None, got "
                f"{type(memory).__name__}"
            )
        shapes = {
            kind: BufferShape(self.num_layers, slots, math.prod(row.shape), row.dtype)
            for kind, row in rows.items()
        }
        self._buffers = memory._make_buffers(function, shapes)
        self._stored = {
            kind: self._shaped(view(self._buffers[kind].bytes, _store_dtype(row.dtype)), row)
            for kind, row in rows.items()
        }
        self._layers = {
            kind: list(self._shaped(view(self._buffers[kind].bytes, row.dtype), row))
            for kind, row in rows.items()
        }

    def _shaped(self, flat: AnyTensor, row: Rows) -> AnyTensor:
        """Return one tensor for all layers, or a list with a tensor for each layer."""
        if row.in_pages:
            return flat.reshape(self.num_layers, self.num_pages, -1)
        if not self.use_fia:
            return flat.reshape(self.num_layers, self.num_pages, self.page_size, *row.shape)
        one = (1,) if len(row.shape) > 1 else ()  # scales lack this axis
        slots = self.num_pages * self.page_size
        return list(flat.reshape(self.num_layers, slots, *one, *row.shape))

    def __repr__(self) -> str:
        gib = self.nbytes / 2**30
        scales = f" with scales of {self.dtypes['k_scale']}" if "k_scale" in self.dtypes else ""
        return (
            f"{type(self).__name__}({', '.join(self.kinds)} of layers "
            f"[{self.start_layer}, {self.end_layer}), {self.num_pages} pages of "
            f"{self.page_size} tokens, {self.dtype}{scales}{', FIA' if self.use_fia else ''}, "
            f"{gib:.3g} GiB)"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of address space; memory is committed as rows are written."""
        return sum(self.get_kv_size_bytes())

    def get_kv_size_bytes(self) -> tuple[int, ...]:
        """Return the bytes of all layers for each of `kinds`."""
        return tuple(self.num_layers * self._buffers[kind].layer_bytes for kind in self.kinds)

    def get_contiguous_buf_infos(self) -> BufInfos:
        """Return address, bytes and bytes per page of each buffer: kind by kind, layers ascending.

        The bytes per page are `page_size` times the bytes of a token in every layout.
        """
        return self._buf_infos(self.kinds)

    def _buf_infos(self, kinds: tuple[str, ...]) -> BufInfos:
        addrs, sizes, page_sizes = [], [], []
        for kind in kinds:
            buffer = self._buffers[kind]
            layer_bytes = buffer.layer_bytes
            addrs += [buffer.addr + i * layer_bytes for i in range(self.num_layers)]
            sizes += [layer_bytes] * self.num_layers
            page_sizes += [self.page_size * buffer.row_bytes] * self.num_layers
        return addrs, sizes, page_sizes

    def _layer_index(self, function: str, layer_id: Any) -> int:
        """Return the index of a layer, given as a number or as an object with a `layer_id`."""
        try:
            layer = getattr(layer_id, "layer_id", layer_id)
        except Exception:  # from an object that refuses even this
            layer = layer_id
        layer = integer(layer, function, "layer_id")
        if not self.start_layer <= layer < self.end_layer:
            raise ValueError(
                f"{function}: layer_id must be in [{self.start_layer}, {self.end_layer}), "
                f"got {layer}"
            )
        return layer - self.start_layer

    def _index_of(self, function: str, kind: str, layer_id: Any) -> int:
        """Return the index of a layer, for a kind that other pools may lack."""
        index = self._layer_index(function, layer_id)
        if kind not in self.kinds:
            raise ValueError(f"{function}: the pool has no {kind}, it has {', '.join(self.kinds)}")
        return index

    def _of_layer(self, function: str, kind: str, layer_id: Any) -> AnyTensor:
        index = self._index_of(function, kind, layer_id)
        return self._layers[kind][index]

    @property
    def k_buffer(self) -> AnyTensor:
        """All keys as stored (`store_dtype`): one tensor, or one per layer under FIA."""
        return self._stored["k"]

    @property
    def v_buffer(self) -> AnyTensor | None:
        """All values, in the same form; None if rows of keys include them."""
        return self._stored.get("v")

    def get_key_buffer(self, layer_id: Any) -> AnyTensor:
        """Return the keys of a layer as `dtype`; layers count in the whole model."""
        return self._layers["k"][self._layer_index("get_key_buffer", layer_id)]

    def get_value_buffer(self, layer_id: Any) -> AnyTensor:
        """Return the values of a layer as `dtype`; layers count in the whole model."""
        return self._of_layer("get_value_buffer", "v", layer_id)

    def get_kv_buffer(self, layer_id: Any) -> tuple[AnyTensor, AnyTensor]:
        """Return keys and values of a layer."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def _set_kv_buffer(
        self,
        layer_id: Any,
        loc: Indices,
        k: Tensor,
        v: Tensor | None,
        k_scale: Any,
        v_scale: Any,
        layer_id_override: int | None,
    ) -> None:
        layer = layer_id if layer_id_override is None else layer_id_override
        k_scales, v_scales = self._buffers.get("k_scale"), self._buffers.get("v_scale")
        _core.set_kv_buffer(
            self._layer_index("set_kv_buffer", layer), loc, self.num_kv_heads, self._buffers["k"],
            k_scales, k, scale_argument("k_scale", k_scale, k_scales is not None),
            self._buffers["v"], v_scales, v,
            scale_argument("v_scale", v_scale, v_scales is not None),
        )  # fmt: skip

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}: a pool cannot be pickled or copied, for it is memory of this "
            "process; KVLayout.from_pool tells others where it is"
        )


class IndexedKVPool(KVPool):
    """Pool that may have index keys beside its keys."""

    @property
    def index_k_buffer(self) -> AnyTensor | None:
        """All index keys as stored, or None."""
        return self._stored.get("index_k")

    def get_index_k_buffer(self, layer_id: Any) -> AnyTensor:
        """Return the index keys of a layer as `dtype`, or as pages of codes and scales."""
        return self._of_layer("get_index_k_buffer", "index_k", layer_id)

    def get_state_buf_infos(self) -> BufInfos:
        """Return `get_contiguous_buf_infos` of the index keys; empty lists without an indexer."""
        return self._buf_infos(("index_k",) if "index_k" in self.kinds else ())


def fia_layout(function: str, use_fia: Any) -> bool:
    """Return the argument, or the setting of the environment."""
    if isinstance(use_fia, bool):
        return use_fia
    if use_fia is not None:
        raise TypeError(f"{function}: use_fia must be a bool or None, got {type(use_fia).__name__}")
    text = os.environ.get("ASCEND_USE_FIA", "")
    try:
        return _FLAGS[text.strip().lower()]
    except KeyError:
        raise ValueError(
            f"{function}: ASCEND_USE_FIA must be true or false, got {text!r}"
        ) from None


def scale_argument(name: str, scale: Any, per_token: bool) -> Any:
    """Return a float, or a tensor that the core checks; None is 1.

    A tensor of one element counts as a number, unless each token and head has a scale.
    """
    if scale is None:
        return 1.0
    is_tensor = has(scale, "__dlpack__")
    if per_token and is_tensor:
        return scale
    try:
        return float(scale)
    except Exception as error:
        if is_tensor:
            return scale
        raise TypeError(
            f"set_kv_buffer: {name} must be a number or a tensor, got {type(scale).__name__}"
        ) from error


def dtype_name(function: str, argument: str, dtype: Any, allowed: tuple[str, ...]) -> str:
    """Return the name of a dtype given by name, NumPy or torch; ValueError unless it is allowed."""
    name = _name_of(function, argument, dtype)
    if name not in allowed:
        names = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
        raise ValueError(f"{function}: {argument} must be {names}, got {name!r}")
    return name


def _store_dtype(dtype: str) -> str:
    return "uint8" if dtype.startswith("float8") else dtype


def _name_of(function: str, argument: str, dtype: Any) -> str:
    try:
        name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
        text = name if isinstance(name, str) else str(dtype)
        text.encode()
    except Exception as error:
        raise TypeError(
            f"{function}: {argument} must be the name of a dtype, or one of NumPy or torch, got "
            f"{type(dtype).__name__}"
        ) from error
    return text.removeprefix("torch.")[:40]


def _viewer(function: str, container: str | None) -> Any:
    """Return the function that views flat bytes as a tensor of a dtype in the container."""
    if container is None:
        container = "torch" if find_spec("torch") else "numpy"
    if not isinstance(container, str):
        raise TypeError(
            f"{function}: container must be 'torch', 'numpy' or None, "
            f"got {type(container).__name__}"
        )
    if container == "torch":
        import torch

        return lambda flat, dtype: torch.from_numpy(flat).view(getattr(torch, dtype))
    if container == "numpy":
        return lambda flat, dtype: flat.view(numpy_dtype(dtype))
    raise ValueError(
        f"{function}: container must be 'torch', 'numpy' or None, got {container!r:.40}"
    )
