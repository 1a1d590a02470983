# SPDX-License-Identifier: Apache-2.0
"""The KV pool of dense attention: keys and values of every head."""

from __future__ import annotations

from typing import Any

from .._arguments import at_least
from .._types import AnyTensor, Indices, Tensor
from .buffers import CODES, NUMBERS, KVPool, Memory, Rows, dtype_name, fia_layout


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
        float32, float16, bfloat16, int8, or float8_e4m3fn or float8_e5m2, which are stored as
        uint8.
    scale_dtype : str, torch or NumPy dtype, optional
        float32, float16 or bfloat16: each write computes a scale of this dtype for each token and
        head, and keeps it in buffers of their own. For int8 and float8 only, where the scales of
        whole tensors or of heads come with each write otherwise.
    start_layer : int
        The first layer's number in the whole model, by which methods know layers.
    use_fia : bool, default ASCEND_USE_FIA of the environment
        Shapes of the fused infer attention operator: a list with [P * page_size, 1, num_kv_heads,
        head_dim] per layer, instead of one tensor [num_layers, P, page_size, num_kv_heads,
        head_dim].
    container : "torch" or "numpy", default "torch" if it is installed
        What views are.
    memory : NumaMemory or cpattn.distributed.SharedMemory, optional
        Where the buffers are: on chosen NUMA nodes; or, by `ContextParallel.shared_memory`, shared:
        all ranks of a host then make the same pool at once, and have one together. Its memory is
        committed here. None, also where ranks share no host: memory of this process.

    Attributes
    ----------
    dtype, store_dtype, scale_dtype : str
        `scale_dtype` is None where there are no scales of each token and head.
    kinds : tuple of str
        ("k", "v"), with such scales ("k", "v", "k_scale", "v_scale").
    dtypes : dict
        The dtype of each kind.
    num_pages, start_layer, end_layer : int
        `end_layer` is behind the last layer.

    Raises
    ------
    TypeError
        For sizes that are no integers, and a container or dtype that is no name.
    ValueError
        For sizes that are too small or beyond 2**63 bytes, and names that are unknown.
    MemoryError
        If the system does not have the address space, or the memory of a shared pool.
    RuntimeError
        If the ranks that share the memory make different pools, or one is lost.

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

    With a scale for each token and head:

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
            Slots; -1 skips a token. Of a slot given twice the last token counts.
        k, v : tensor of num_tokens * num_kv_heads * head_dim (v_head_dim) elements
            In any shape. Of the pool's dtype they are copied; an FP8 pool takes uint8, too. Else
            float32, float16 or bfloat16, which become ``x / scale`` in float32, rounded to nearest
            even. What is beyond the largest number of a code becomes that number: 448 in e4m3fn,
            57344 in e5m2, 127 in int8.
        k_scale, v_scale : number or tensor, default 1
            Scales for rows of another dtype than the pool's: a number, or float32 [num_kv_heads]
            for the heads. In a pool with `scale_dtype` the write computes them; only codes, rows
            of the pool's dtype, are given theirs: num_tokens * num_kv_heads of `scale_dtype`.
        layer_id_override : int, optional
            Instead of `layer_id`.

        Raises
        ------
        ValueError
            For a layer or slot that is not there, other numbers of elements and dtypes that do not
            fit; nothing is written then.

        Notes
        -----
        The scale of a token and head is ``max(|x|)`` divided by the largest number of a code, is
        rounded to `scale_dtype`, and divides as it is stored; where it would be below 2**-126 it
        and the codes are 0. NaN stays NaN: in a pool with `scale_dtype` as a scale that is NaN, of
        heads with an infinity, too; in e4m3fn and e5m2 as a code. In int8 without scales of each
        token it becomes -128, a code that nothing else becomes. An infinity stays one in e5m2, and
        is the largest number of the other codes.
        """
        self._set_kv_buffer(layer_id, loc, k, v, k_scale, v_scale, layer_id_override)

    def get_key_scale_buffer(self, layer_id: Any) -> AnyTensor:
        """The scales of a layer's keys, [P, page_size, num_kv_heads] of `scale_dtype`.

        Under FIA [P * page_size, num_kv_heads]. What attention takes as ``k_scale``.
        """
        return self._of_layer("get_key_scale_buffer", "k_scale", layer_id)

    def get_value_scale_buffer(self, layer_id: Any) -> AnyTensor:
        """The scales of a layer's values, likewise."""
        return self._of_layer("get_value_scale_buffer", "v_scale", layer_id)
