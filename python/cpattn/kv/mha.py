# SPDX-License-Identifier: Apache-2.0
"""The KV pool of dense attention: keys and values of every head."""

from __future__ import annotations

from typing import Any

from .._arguments import at_least
from .._types import Indices, Tensor
from .buffers import KVPool, fia_layout


class MHATokenToKVPool(KVPool):
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
        use_fia = fia_layout(function, use_fia)
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
