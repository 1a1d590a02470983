# SPDX-License-Identifier: Apache-2.0
"""Buffer of a KV cache, with a description of its contents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .._arguments import flag, integer
from .._containers import torch_of
from .._types import AnyTensor


class KVEntry(NamedTuple):
    """Registered buffer with the pages of one kind of one layer.

    Attributes
    ----------
    layer_id : int
        Layer number in the whole model, for any stage or subset of layers; draft layers count from
        0 again.
    kind : str
        "k", "v", "index_k", "state", "k_scale" or "v_scale". An MLA latent is "k", its rope part
        "v"; scales of codes, one per token and head, are "k_scale" and "v_scale".
    is_draft : bool
        Whether the layer is of a draft (MTP, EAGLE) model.
    addr, nbytes : int
        Address of the first page, and bytes from there to the end of the last page.
    item_len : int
        Bytes of a page. 0, with no `nbytes`, if this side left the buffer out, which is allowed for
        "index_k" and "state", in layers that reuse the top-k of an earlier layer. A pair of buffers
        is skipped if either side left it out.
    token_rows : bool
        Whether a page has a row for each of its tokens, in order, or with ``kv_layout="HND"`` for
        each head and token. If not (pages of FP8 index keys followed by scales), plans send whole
        pages or refuse.
    dtype : str
        Type of the numbers, such as "int8"; "" if unknown. If both sides of a transfer give it,
        they must agree.
    page_stride : int, optional
        Bytes from page to page, if other buffers lie between, as V between the pages of K in a
        cache ``[pages, 2, page_size, num_kv_heads, head_dim]``; default: `item_len`.
    kv_layout : {"NHD", "HND"}
        Axis order of a page: ``[page_size, num_kv_heads, head_dim]``, or with heads first
        ``[num_kv_heads, page_size, head_dim]``, as in `cpattn.paged_attention`. HND needs
        `KVLayout.total_kv_heads`.
    layout_tag : str
        Name of the byte order if pages are no rows of tokens, such as tiles of a kernel; else "".
        Plans refuse sides with different names.

    Examples
    --------
    >>> entry = KVEntry(layer_id=3, kind="k", is_draft=False, addr=4096, nbytes=4608, item_len=512)
    >>> entry.nbytes // entry.item_len  # pages
    9
    >>> entry.token_rows
    True
    """

    layer_id: int
    kind: str
    is_draft: bool
    addr: int
    nbytes: int
    item_len: int
    token_rows: bool = True
    dtype: str = ""
    page_stride: int | None = None
    kv_layout: str = "NHD"
    layout_tag: str = ""

    @classmethod
    def from_tensor(
        cls,
        layer_id: int,
        kind: str,
        tensor: AnyTensor,
        *,
        kv_layout: str = "NHD",
        is_draft: bool = False,
        layout_tag: str = "",
    ) -> KVEntry:
        """Describe the pages of a tensor, which may be a view with gaps between its pages.

        The entry has only an address: the caller must keep the tensor alive, as `register` does
        with the cache behind the tensor.

        Parameters
        ----------
        layer_id, kind, is_draft, layout_tag
            See `KVEntry`. With a `layout_tag`, pages count as no rows of tokens, for any shape.
        tensor : tensor of torch or NumPy, shape [num_pages, ...]
            Pages of ``[page_size, num_kv_heads, head_dim]``, without the heads for latents, or
            without the dimension for scales; with heads first for ``kv_layout="HND"``. A page must
            be contiguous in either order of tokens and heads, not only in the order of its shape.
        kv_layout : {"NHD", "HND"}
            Axis order of the shape. The entry has the order in memory.

        Returns
        -------
        KVEntry

        Raises
        ------
        TypeError
            If `tensor` is no tensor of torch or NumPy, or another argument has another type.
        ValueError
            If pages are empty, not contiguous or overlap, or `kv_layout` is unknown.

        Examples
        --------
        >>> import numpy as np
        >>> from cpattn.transfer import KVLayout
        >>> cache = np.zeros((9, 2, 16, 4, 32), np.float16)  # [pages, K and V, tokens, heads, dim]
        >>> k, v = (KVEntry.from_tensor(0, "kv"[i], cache[:, i]) for i in range(2))
        >>> k.item_len, k.page_stride, v.addr - k.addr, v.nbytes
        (4096, 8192, 4096, 69632)
        >>> KVLayout([k, v], page_size=16, total_kv_heads=4)
        KVLayout(2 buffers of 1 layer, page_size=16, total_kv_heads=4)
        """
        function = "KVEntry.from_tensor"
        if kv_layout not in ("NHD", "HND"):
            raise ValueError(f"{function}: kv_layout must be 'NHD' or 'HND', got {kv_layout!r:.40}")
        memory = _memory_of(tensor, function)
        item_len = memory.itemsize * math.prod(memory.shape[1:])
        num_pages, stride = memory.shape[0], memory.strides[0]
        if item_len == 0 or (num_pages > 1 and stride < item_len):
            raise ValueError(
                f"{function}: pages of tensor must have bytes and lie apart, got {memory}"
            )
        has_heads = len(memory.shape) == 4 or kind in ("k_scale", "v_scale")
        order = memory.order(kv_layout, has_heads, function)
        return cls(
            integer(layer_id, function, "layer_id"), kind, flag(is_draft, function, "is_draft"),
            memory.addr, (num_pages - 1) * stride + item_len if num_pages else 0, item_len,
            token_rows=not layout_tag, layout_tag=layout_tag,
            dtype=memory.dtype, page_stride=stride if num_pages > 1 and stride > item_len else None,
            kv_layout="NHD" if layout_tag else order,
        )  # fmt: skip


class _Memory(NamedTuple):
    """Memory of a tensor: strides are in bytes."""

    addr: int
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def order(self, kv_layout: str, has_heads: bool, function: str) -> str:
        """Return the page order in memory for a shape with the order `kv_layout`."""
        axes = list(zip(self.shape, self.strides, strict=True))[1:]
        if self._is_dense(axes):
            return kv_layout
        if has_heads and self._is_dense([axes[1], axes[0], *axes[2:]]):
            return "HND" if kv_layout == "NHD" else "NHD"
        raise ValueError(f"{function}: each page of tensor must be contiguous, got {self}")

    def _is_dense(self, axes: Sequence[tuple[int, int]]) -> bool:
        expected = self.itemsize
        for size, stride in reversed(axes):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True

    def __str__(self) -> str:
        return f"shape {list(self.shape)} with strides of {list(self.strides)} bytes"


def _memory_of(tensor: AnyTensor, function: str) -> _Memory:
    x: Any = tensor
    torch = torch_of(x)
    if torch is not None and x.layout is torch.strided:
        size, dtype = x.element_size(), str(x.dtype).removeprefix("torch.")
        strides = tuple(size * stride for stride in x.stride())
        memory = _Memory(x.data_ptr(), dtype, size, tuple(x.shape), strides)
    elif isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray):
        memory = _Memory(x.ctypes.data, x.dtype.name, x.itemsize, x.shape, x.strides)
    else:
        raise TypeError(
            f"{function}: tensor must be a strided one of torch or NumPy, got {type(x).__name__}"
        )
    if not 3 <= len(memory.shape) <= 4:
        raise ValueError(
            f"{function}: tensor must have the shape [num_pages, page_size, num_kv_heads, "
            f"head_dim], or without one of the last two, got {list(memory.shape)}"
        )
    return memory


KVEntry.__module__ = "cpattn.transfer"
