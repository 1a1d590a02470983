# SPDX-License-Identifier: Apache-2.0
"""The attention layer of a model, by sizes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpattn._arguments import flag, key_window
from cpattn._limits import check_integer

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
UNBOUNDED = 1 << 40  # keys, far above any sequence

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class AttentionLayer:
    """The attention of one model: sizes of a layer, and how many layers there are.

    Parameters
    ----------
    num_heads, num_kv_heads : int
        Heads of the queries, a multiple of those of keys and values.
    head_dim : int
        Elements of a key, up to 576.
    v_head_dim : int, optional
        Elements of a value, likewise. Default: head_dim.
    dtype : {"bfloat16", "float16", "float32"}
        Dtype of queries, keys and values.
    num_layers : int
        At least 1.
    page_size : int
        Tokens of a page, at least 1.
    window : int or (int or None, int or None), optional
        Keys before a token's own that it sees, under a causal mask; or keys before and behind it
        without one, None for all of a side. Default: all before it.
    latent : bool
        Whether values are the first `v_head_dim` elements of the keys, as in absorbed MLA: they
        are neither sent nor stored besides.
    bias : {"alibi", "float32", "float16", "bfloat16"}, optional
        What is added to scores: distances, or numbers of this dtype for each query head.

    Raises
    ------
    TypeError
        For sizes that are no integers.
    ValueError
        For sizes out of range, by name and rule, and other dtypes.

    Examples
    --------
    >>> from cpattn_lab.cost_model import AttentionLayer
    >>> layer = AttentionLayer(num_heads=32, num_kv_heads=8, head_dim=128)
    >>> layer.kv_row_bytes                 # 8 heads of 128 + 128 elements of two bytes
    4096
    """

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    v_head_dim: int | None = None
    dtype: str = "bfloat16"
    num_layers: int = 32
    page_size: int = 128
    window: int | tuple[int | None, int | None] | None = None
    latent: bool = False
    bias: str | None = None

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "num_heads", "num_layers", "page_size"):
            check_integer("AttentionLayer", name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"AttentionLayer: num_heads must be a multiple of num_kv_heads = "
                f"{self.num_kv_heads}, got {self.num_heads}"
            )
        for name in ("head_dim", "v_head_dim"):
            dim = getattr(self, name)
            if dim is None and name == "v_head_dim":
                continue
            check_integer("AttentionLayer", name, dim)
            if dim > 576:
                raise ValueError(f"AttentionLayer: {name} must be at most 576, got {dim}")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(
                f"AttentionLayer: dtype must be one of {', '.join(ITEM_BYTES)}, got {self.dtype!r}"
            )
        if self.bias not in (None, "alibi", *ITEM_BYTES):
            raise ValueError(
                f"AttentionLayer: bias must be alibi or one of {', '.join(ITEM_BYTES)}, got "
                f"{self.bias!r}"
            )
        key_window(self.window, not isinstance(self.window, tuple), "AttentionLayer", "window")
        flag(self.latent, "AttentionLayer", "latent")
        if self.latent and (self.v_head_dim or self.head_dim) > self.head_dim:
            raise ValueError(
                f"AttentionLayer: v_head_dim must be at most head_dim = {self.head_dim} in a layer "
                f"of latents, got {self.v_head_dim}"
            )

    @property
    def dims(self) -> int:
        """Elements of a key and a value of one head, together."""
        return self.head_dim + (self.v_head_dim or self.head_dim)

    @property
    def v_dim(self) -> int:
        """Elements of a value of one head."""
        return self.dims - self.head_dim

    @property
    def kv_row_bytes(self) -> int:
        """Bytes of the keys and values of one token in one layer."""
        elements = self.head_dim if self.latent else self.dims
        return self.num_kv_heads * elements * ITEM_BYTES[self.dtype]

    @property
    def bias_bytes(self) -> int:
        """Bytes that a query head reads of a bias for a key."""
        return ITEM_BYTES.get(self.bias or "", 0)

    @property
    def most_keys(self) -> int:
        """The keys up to its own that a token sees at most."""
        left = self.window[0] if isinstance(self.window, tuple) else self.window
        return UNBOUNDED if left is None else min(left, UNBOUNDED - 1) + 1

    @property
    def keys_behind(self) -> int:
        """The keys behind its own that a token sees at most: none under a causal mask."""
        right = self.window[1] if isinstance(self.window, tuple) else 0
        return UNBOUNDED if right is None else min(right, UNBOUNDED)

    def pool_bytes(self, seq_lens: Ints) -> int:
        """Count the bytes of the pages that sequences take up, in all layers.

        Every rank keeps all of them.

        Parameters
        ----------
        seq_lens : array [bs], int64
            Tokens of each sequence.

        Returns
        -------
        int
        """
        pages = -(-seq_lens // self.page_size)
        return int(pages.sum()) * self.page_size * self.kv_row_bytes * self.num_layers
