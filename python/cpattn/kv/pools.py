# SPDX-License-Identifier: Apache-2.0
"""KV pools: the paged caches of a server's layers, as engines for an NPU lay them out."""

from __future__ import annotations

import math
import os
import sys
from typing import Any, NoReturn

from .. import _core
from .._arguments import at_least, integer
from .._containers import numpy_dtype
from .._types import AnyTensor, Indices, Tensor

_FLAGS = {
    **dict.fromkeys(("1", "true", "yes", "y", "on"), True),
    **dict.fromkeys(("", "0", "false", "no", "n", "off"), False),
}

BufInfos = tuple[list[int], list[int], list[int]]


class _KVPool:
    """Buffers of several kinds with one row per layer, token slot and kind.

    `rows` says how many heads of how many elements a row of each kind has.
    """

    def __init__(
        self,
        rows: dict[str, tuple[int, int]],
        size: int,
        page_size: int,
        num_layers: int,
        dtype: Any,
        start_layer: int,
        use_fia: bool,
        container: str | None,
    ):
        function = type(self).__name__
        self.size = at_least(0, size, function, "size")
        self.page_size = at_least(1, page_size, function, "page_size")
        self.num_pages = self.size // self.page_size + 1
        self.num_layers = self.layer_num = at_least(1, num_layers, function, "num_layers")
        self.start_layer = at_least(0, start_layer, function, "start_layer")
        self.end_layer = self.start_layer + self.num_layers
        self.dtype = _dtype_name(function, dtype)
        self.store_dtype = "uint8" if self.dtype.startswith("float8") else self.dtype
        self.use_fia = use_fia
        self.kinds = tuple(rows)
        slots = self.num_pages * self.page_size
        self._buffers = {
            kind: _core.KVBuffer(function, self.num_layers, slots, math.prod(row), self.dtype)
            for kind, row in rows.items()
        }
        view = _viewer(function, container)
        self._stored = {
            kind: self._shaped(view(buffer.bytes, self.store_dtype), rows[kind])
            for kind, buffer in self._buffers.items()
        }
        self._layers = {
            kind: list(self._shaped(view(buffer.bytes, self.dtype), rows[kind]))
            for kind, buffer in self._buffers.items()
        }

    def _shaped(self, flat: AnyTensor, row: tuple[int, int]) -> AnyTensor:
        """One tensor for all layers, or a list of a tensor for each."""
        if not self.use_fia:
            return flat.reshape(self.num_layers, self.num_pages, self.page_size, *row)
        return list(flat.reshape(self.num_layers, self.num_pages * self.page_size, 1, *row))

    def __repr__(self) -> str:
        gib = self.nbytes / 2**30
        return (
            f"{type(self).__name__}({', '.join(self.kinds)} of layers "
            f"[{self.start_layer}, {self.end_layer}), {self.num_pages} pages of "
            f"{self.page_size} tokens, {self.dtype}{', FIA' if self.use_fia else ''}, "
            f"{gib:.3g} GiB)"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of address space; memory is taken as rows are written."""
        return sum(self.get_kv_size_bytes())

    def get_kv_size_bytes(self) -> tuple[int, ...]:
        """Bytes of all layers of each of `kinds`."""
        return tuple(self.num_layers * self._buffers[kind].layer_bytes for kind in self.kinds)

    def get_contiguous_buf_infos(self) -> BufInfos:
        """Address, bytes and bytes of a page of each buffer: the kinds in turn, layers ascending.

        The bytes of a page are `page_size` times those of a token in every layout.
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
        """Of a layer, or of what has a `layer_id`, as engines' attention layers do."""
        try:
            layer = getattr(layer_id, "layer_id", layer_id)
        except Exception:  # of an object that refuses even this
            layer = layer_id
        layer = integer(layer, function, "layer_id")
        if not self.start_layer <= layer < self.end_layer:
            raise ValueError(
                f"{function}: layer_id must be in [{self.start_layer}, {self.end_layer}), "
                f"got {layer}"
            )
        return layer - self.start_layer

    @property
    def k_buffer(self) -> AnyTensor:
        """All keys as they are stored (`store_dtype`): one tensor, or one per layer under FIA."""
        return self._stored["k"]

    @property
    def v_buffer(self) -> AnyTensor:
        """All values, likewise."""
        return self._stored["v"]

    def get_key_buffer(self, layer_id: Any) -> AnyTensor:
        """The keys of a layer, by its number in the whole model, as `dtype`."""
        return self._layers["k"][self._layer_index("get_key_buffer", layer_id)]

    def get_value_buffer(self, layer_id: Any) -> AnyTensor:
        """The values of a layer, by its number in the whole model, as `dtype`."""
        return self._layers["v"][self._layer_index("get_value_buffer", layer_id)]

    def get_kv_buffer(self, layer_id: Any) -> tuple[AnyTensor, AnyTensor]:
        """Keys and values of a layer."""
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
        _core.set_kv_buffer(
            self._layer_index("set_kv_buffer", layer),
            loc,
            self._buffers["k"],
            k,
            _scale("k_scale", k_scale),
            self._buffers["v"],
            v,
            _scale("v_scale", v_scale),
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}: a pool cannot be pickled or copied, for it is memory of this "
            "process; KVLayout.from_pool tells others where it is"
        )


class MHATokenToKVPool(_KVPool):
    """Keys and values of the layers of a pipeline stage.

    There are ``size // page_size + 1`` pages; page 0 takes what padded tokens write. Token slot
    t is row ``t % page_size`` of page ``t // page_size``, and lies ``t`` rows behind the start
    of its layer in both layouts. The memory is zero, aligned to 4096 bytes, layer behind layer,
    and committed as it is written, by large pages of 2 MiB if the system has them. Views of it
    keep it alive.

    Parameters
    ----------
    size : int
        Token slots beside those of page 0; what does not fill a page is not there.
    page_size : int
        Tokens of a page.
    num_layers : int
        Layers of this stage.
    num_kv_heads, head_dim : int
        Heads of keys and values on this rank, and elements of a key.
    v_head_dim : int, default head_dim
    dtype : str, torch or NumPy dtype
        float32, float16, bfloat16 or float8_e4m3fn, which is stored as uint8.
    start_layer : int
        The first layer's number in the whole model, by which methods know layers.
    use_fia : bool, default ASCEND_USE_FIA of the environment
        Shapes of the fused infer attention operator: a list with [P * page_size, 1, num_kv_heads,
        head_dim] per layer, instead of one tensor [num_layers, P, page_size, num_kv_heads,
        head_dim].
    container : "torch" or "numpy", default "torch" if it has been imported
        What views are.

    Attributes
    ----------
    dtype, store_dtype : str
    kinds : tuple of str
        ("k", "v")
    num_pages, start_layer, end_layer : int
        `end_layer` is behind the last layer.

    Raises
    ------
    TypeError
        For sizes that are no integers, and a container or dtype that is no name.
    ValueError
        For sizes that are too small or beyond 2**63 bytes, and names that are unknown.
    MemoryError
        If the system does not have the address space.

    Notes
    -----
    There is no `get_state_buf_infos`: engines ask for the method to find out whether a pool has
    state to send.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> pool = cpattn.kv.MHATokenToKVPool(
    ...     size=64, page_size=8, num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32",
    ...     container="numpy")
    >>> rows = np.ones((3, 2, 8), np.float32)
    >>> pool.set_kv_buffer(1, [8, 9, 10], rows, 2 * rows)
    >>> pool.get_value_buffer(1)[1, :4, 0, 0]
    array([2., 2., 2., 0.], dtype=float32)
    >>> addrs, sizes, page_sizes = pool.get_contiguous_buf_infos()
    >>> sizes[0], page_sizes[0], pool.num_pages
    (4608, 512, 9)
    """

    def __init__(
        self,
        *,
        size: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: Any = "bfloat16",
        start_layer: int = 0,
        use_fia: bool | None = None,
        container: str | None = None,
    ):
        function = type(self).__name__
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.num_kv_heads = at_least(1, num_kv_heads, function, "num_kv_heads")
        self.head_dim = at_least(1, head_dim, function, "head_dim")
        self.v_head_dim = at_least(1, v_head_dim, function, "v_head_dim")
        heads = self.num_kv_heads
        rows = {"k": (heads, self.head_dim), "v": (heads, self.v_head_dim)}
        use_fia = _use_fia(function, use_fia)
        super().__init__(rows, size, page_size, num_layers, dtype, start_layer, use_fia, container)

    def set_kv_buffer(
        self,
        layer_id: Any,
        loc: Indices,
        k: Tensor,
        v: Tensor,
        k_scale: Any = None,
        v_scale: Any = None,
        layer_id_override: int | None = None,
    ) -> None:
        """Write keys and values of tokens to their slots.

        Parameters
        ----------
        layer_id : int, or an object with a `layer_id`
        loc : ints, shape [num_tokens]
            Slots; -1 skips a token. Of a slot given twice the last token counts.
        k, v : tensor of num_tokens * num_kv_heads * head_dim (v_head_dim) elements
            In any shape. Of the pool's dtype they are copied; an FP8 pool takes uint8, too. Else
            float32, float16 or bfloat16, which become ``x / scale`` in float32, rounded to nearest
            even. In e4m3fn what is beyond 448 counts as 448, as in torch.
        k_scale, v_scale : number, default 1
            For rows of another dtype than the pool's only.
        layer_id_override : int, optional
            Instead of `layer_id`.

        Raises
        ------
        ValueError
            For a layer or slot that is not there, other numbers of elements and dtypes that do not
            fit; nothing is written then.
        """
        self._set_kv_buffer(layer_id, loc, k, v, k_scale, v_scale, layer_id_override)


class MLATokenToKVPool(_KVPool):
    """Latent keys of multi-head latent attention, their rotary part and keys of an indexer.

    As `MHATokenToKVPool`, in one layout: [num_layers, P, page_size, 1, width] of each kind.

    Parameters
    ----------
    size, page_size, num_layers : int
        As of `MHATokenToKVPool`.
    kv_lora_rank : int
        Width of `k_buffer`.
    qk_rope_head_dim : int
        Width of `v_buffer`.
    index_head_dim : int, optional
        Width of `index_k_buffer`, which is None without.
    dtype, start_layer, container
        As of `MHATokenToKVPool`.
    use_fia : bool, optional
        Accepted for symmetry; there is one layout.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As of `MHATokenToKVPool`.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> pool = cpattn.kv.MLATokenToKVPool(
    ...     size=64, page_size=8, num_layers=2, kv_lora_rank=16, qk_rope_head_dim=8,
    ...     dtype="float32", container="numpy")
    >>> latent = np.ones((2, 24), np.float32)     # both parts of a key, side by side
    >>> pool.set_kv_buffer(0, [8, 9], latent)
    >>> [buffer.shape for buffer in pool.get_kv_buffer(0)]
    [(9, 8, 1, 16), (9, 8, 1, 8)]
    """

    def __init__(
        self,
        *,
        size: int,
        page_size: int,
        num_layers: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        index_head_dim: int | None = None,
        dtype: Any = "bfloat16",
        start_layer: int = 0,
        use_fia: bool | None = None,
        container: str | None = None,
    ):
        function = type(self).__name__
        self.num_kv_heads = 1
        self.kv_lora_rank = at_least(1, kv_lora_rank, function, "kv_lora_rank")
        self.qk_rope_head_dim = at_least(1, qk_rope_head_dim, function, "qk_rope_head_dim")
        self.head_dim, self.v_head_dim = self.kv_lora_rank, self.qk_rope_head_dim
        self.index_head_dim = None
        rows = {"k": (1, self.kv_lora_rank), "v": (1, self.qk_rope_head_dim)}
        if index_head_dim is not None:
            self.index_head_dim = at_least(1, index_head_dim, function, "index_head_dim")
            rows["index_k"] = (1, self.index_head_dim)
        if use_fia is not None:
            _use_fia(function, use_fia)
        super().__init__(rows, size, page_size, num_layers, dtype, start_layer, False, container)

    @property
    def index_k_buffer(self) -> AnyTensor | None:
        """All keys of the indexer as they are stored, or None."""
        return self._stored.get("index_k")

    def get_index_k_buffer(self, layer_id: Any) -> AnyTensor:
        """The keys of a layer's indexer, as `dtype`."""
        index = self._layer_index("get_index_k_buffer", layer_id)
        self._check_index("get_index_k_buffer")
        return self._layers["index_k"][index]

    def get_state_buf_infos(self) -> BufInfos:
        """As `get_contiguous_buf_infos`, of the keys of the indexer; empty lists without it."""
        return self._buf_infos(("index_k",) if "index_k" in self.kinds else ())

    def set_kv_buffer(
        self,
        layer_id: Any,
        loc: Indices,
        k: Tensor,
        v: Tensor | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
        layer_id_override: int | None = None,
    ) -> None:
        """Write latent keys and their rotary part, as `MHATokenToKVPool.set_kv_buffer`.

        Without `v`, the last dimension of `k` holds both, kv_lora_rank + qk_rope_head_dim wide.
        """
        self._set_kv_buffer(layer_id, loc, k, v, k_scale, v_scale, layer_id_override)

    def set_index_k_buffer(self, layer_id: Any, loc: Indices, index_k: Tensor) -> None:
        """Write keys of the indexer, num_tokens * index_head_dim elements, likewise."""
        index = self._layer_index("set_index_k_buffer", layer_id)
        self._check_index("set_index_k_buffer")
        _core.set_index_k_buffer(index, loc, self._buffers["index_k"], index_k)

    def _check_index(self, function: str) -> None:
        if self.index_head_dim is None:
            raise ValueError(f"{function}: the pool was made without index_head_dim")


def _use_fia(function: str, use_fia: Any) -> bool:
    """The argument, or what the environment says."""
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


def _scale(name: str, scale: Any) -> float:
    """A number or a tensor of one; no scale is 1."""
    try:
        return 1.0 if scale is None else float(scale)
    except Exception as error:
        raise TypeError(
            f"set_kv_buffer: {name} must be a number, got {type(scale).__name__}"
        ) from error


def _dtype_name(function: str, dtype: Any) -> str:
    """Of a name, a NumPy or torch dtype, or a NumPy scalar type."""
    try:
        name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
        text = name if isinstance(name, str) else str(dtype)
        text.encode()
    except Exception as error:
        raise TypeError(
            f"{function}: dtype must be the name of one, or one of NumPy or torch, got "
            f"{type(dtype).__name__}"
        ) from error
    return text.removeprefix("torch.")[:40]


def _viewer(function: str, container: str | None) -> Any:
    """How bytes become a flat tensor of a dtype in the container."""
    if container is None:
        container = "torch" if "torch" in sys.modules else "numpy"
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
