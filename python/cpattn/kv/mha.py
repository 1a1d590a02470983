# SPDX-License-Identifier: Apache-2.0
"""KV pool of dense attention: keys and values of every head."""

from __future__ import annotations

from typing import Any

from .._arguments import at_least
from .._types import AnyTensor, Indices, Tensor
from .buffers import CODES, NUMBERS, KVPool, Memory, Rows, dtype_name, fia_layout


class MHATokenToKVPool(KVPool):
    """KV pool with keys and values of the layers of a pipeline stage.

    There are ``size // page_size + 1`` pages; page 0 receives writes of padded tokens. Token slot t
    is row ``t % page_size`` of page ``t // page_size``, and lies ``t`` rows after the start of its
    layer in both layouts. The memory is zero, aligned to 4096 bytes, layer after layer, and
    committed as it is written, in large pages of 2 MiB if the system has them. Views keep it alive.

    Parameters
    ----------
    size : int
        Token slots without page 0; rounded down to whole pages.
    page_size : int
        Tokens per page.
    num_layers : int
        Layers of this stage.
    num_kv_heads, head_dim : int
        KV heads on this rank, and elements of a key.
    v_head_dim : int, default head_dim
    dtype : str, torch or NumPy dtype
        float32, float16, bfloat16, int8, float8_e4m3fn or float8_e5m2; float8 is stored as uint8.
    scale_dtype : str, torch or NumPy dtype, optional
        float32, float16 or bfloat16: each write computes a scale of this dtype for each token and
        head, and keeps it in separate buffers. For int8 and float8 only. Default: scales of tensors
        or heads come with each write.
    start_layer : int
        Number of the first layer in the whole model; methods take layer numbers of the whole model.
    use_fia : bool, default ASCEND_USE_FIA of the environment
        Shapes of the fused infer attention operator: a list with [P * page_size, 1, num_kv_heads,
        head_dim] per layer, instead of one tensor [num_layers, P, page_size, num_kv_heads,
        head_dim].
    container : "torch" or "numpy", default "torch" if it is installed
        Container of the views.
    memory : NumaMemory or cpattn.distributed.SharedMemory, optional
        Place of the buffers: chosen NUMA nodes, or, from `ContextParallel.shared_memory`, shared
        memory: all ranks of a host then make the same pool at once and share it, and its memory is
        committed here. None (also if ranks share no host): private memory of this process.

    Attributes
    ----------
    dtype, store_dtype, scale_dtype : str
        `scale_dtype` is None if tokens and heads have no scales of their own.
    kinds : tuple of str
        ("k", "v"), or with such scales ("k", "v", "k_scale", "v_scale").
    dtypes : dict
        Dtype of each kind.
    num_pages, start_layer, end_layer : int
        `end_layer` is one past the last layer.

    Raises
    ------
    TypeError
        If sizes are no integers, or a container or dtype is no name.
    ValueError
        If sizes are too small or beyond 2**63 bytes, or a name is unknown.
    MemoryError
        If the system lacks the address space, or the memory of a shared pool.
    RuntimeError
        If the ranks that share the memory make different pools, or a rank is lost.

    Notes
    -----
    There is no `get_state_buf_infos`: its presence tells engines that a pool has state to send.

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

    Pool with a scale for each token and head:

    >>> pool = cpattn.kv.MHATokenToKVPool(
    ...     size=64, page_size=8, num_layers=1, num_kv_heads=2, head_dim=8, dtype="int8",
    ...     scale_dtype="float32", container="numpy")
    >>> pool.set_kv_buffer(0, [8, 9, 10], rows, 2 * rows)
    >>> codes, scales = pool.get_value_buffer(0)[1, 0, 0], pool.get_value_scale_buffer(0)[1, 0]
    >>> codes[:3], (127 * scales).round(6)
    (array([127, 127, 127], dtype=int8), array([2., 2.], dtype=float32))
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
        scale_dtype: Any = None,
        start_layer: int = 0,
        use_fia: bool | None = None,
        container: str | None = None,
        memory: Memory | None = None,
    ):
        function = type(self).__name__
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.num_kv_heads = at_least(1, num_kv_heads, function, "num_kv_heads")
        self.head_dim = at_least(1, head_dim, function, "head_dim")
        self.v_head_dim = at_least(1, v_head_dim, function, "v_head_dim")
        heads = self.num_kv_heads
        dtype = dtype_name(function, "dtype", dtype, (*NUMBERS, *CODES))
        rows = {
            "k": Rows((heads, self.head_dim), dtype),
            "v": Rows((heads, self.v_head_dim), dtype),
        }
        self.scale_dtype = None
        if scale_dtype is not None:
            if dtype not in CODES:
                raise ValueError(
                    f"{function}: scale_dtype must be None for a pool of {dtype}, which has no "
                    "codes to scale"
                )
            self.scale_dtype = dtype_name(function, "scale_dtype", scale_dtype, NUMBERS)
            rows["k_scale"] = rows["v_scale"] = Rows((heads,), self.scale_dtype)
        use_fia = fia_layout(function, use_fia)
        super().__init__(
            rows, size, page_size, num_layers, dtype, start_layer, use_fia, container, memory
        )

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
            Slots; -1 skips a token. If several tokens have the same slot, the last one counts.
        k, v : tensor of num_tokens * num_kv_heads * head_dim (v_head_dim) elements
            Rows in any shape. Rows of the pool's dtype (in an FP8 pool also uint8) are copied. Rows
            of float32, float16 or bfloat16 become ``x / scale`` in float32, rounded to nearest
            even. Numbers beyond the largest code saturate: 448 in e4m3fn, 57344 in e5m2, 127 in
            int8.
        k_scale, v_scale : number or tensor, default 1
            Scales for rows of another dtype than the pool's: a number, or float32 [num_kv_heads]. A
            pool with `scale_dtype` computes them; only rows of codes come with scales, num_tokens *
            num_kv_heads of `scale_dtype`.
        layer_id_override : int, optional
            Layer to use instead of `layer_id`.

        Raises
        ------
        ValueError
            If the pool lacks the layer or a slot, or numbers of elements or dtypes do not fit;
            nothing is written then.

        Notes
        -----
        The scale of a token and head is ``max(|x|)`` divided by the largest code, rounded to
        `scale_dtype`; codes are computed with the rounded scale. If the scale would be below
        2**-126, it and the codes are 0. NaN stays NaN: in a pool with `scale_dtype` as a NaN scale
        (also for heads with an infinity), in e4m3fn and e5m2 as a code. In int8 without scales of
        tokens NaN becomes -128, a code that only NaN has. Infinity stays infinity in e5m2, and
        saturates in other codes.
        """
        self._set_kv_buffer(layer_id, loc, k, v, k_scale, v_scale, layer_id_override)

    def get_key_scale_buffer(self, layer_id: Any) -> AnyTensor:
        """Return the scales of a layer's keys, [P, page_size, num_kv_heads] of `scale_dtype`.

        Under FIA they are [P * page_size, num_kv_heads]. Attention takes them as ``k_scale``.
        """
        return self._of_layer("get_key_scale_buffer", "k_scale", layer_id)

    def get_value_scale_buffer(self, layer_id: Any) -> AnyTensor:
        """Return the scales of a layer's values, in the form of `get_key_scale_buffer`."""
        return self._of_layer("get_value_scale_buffer", "v_scale", layer_id)
