# SPDX-License-Identifier: Apache-2.0
"""Sizes of the attention layer of a model."""

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
    """Attention of one model: sizes of a layer, and number of layers.

    Parameters
    ----------
    num_heads, num_kv_heads : int
        Query heads, a multiple of the KV heads.
    head_dim : int
        Elements of a key, up to 576.
    v_head_dim : int, optional
        Elements of a value, up to 576. Default: head_dim.
    dtype : {"bfloat16", "float16", "float32"}
        Dtype of queries, keys and values.
    num_layers : int
        At least 1.
    page_size : int
        Tokens per page, at least 1.
    window : int or (int or None, int or None), optional
        Number of visible keys before a token's own, under a causal mask; or before and behind it
        without one, None for all of a side. Default: all before it.
    latent : bool
        Whether values are the first `v_head_dim` elements of the keys, as in absorbed MLA: they are
        neither sent nor stored separately.
    bias : {"alibi", "float32", "float16", "bfloat16"}, optional
        Bias of scores: distances, or numbers of this dtype for each query head.

    Raises
    ------
    TypeError
        If a size is no integer.
    ValueError
        If a size is out of range, or a dtype is unknown; names the argument and the rule.

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
        """Total elements of a key and a value of one head."""
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
        """Bytes of a bias that a query head reads for a key."""
        return ITEM_BYTES.get(self.bias or "", 0)

    @property
    def most_keys(self) -> int:
        """Most keys that a token sees up to its own."""
        left = self.window[0] if isinstance(self.window, tuple) else self.window
        return UNBOUNDED if left is None else min(left, UNBOUNDED - 1) + 1

    @property
    def keys_behind(self) -> int:
        """Most keys that a token sees behind its own: none under a causal mask."""
        right = self.window[1] if isinstance(self.window, tuple) else 0
        return UNBOUNDED if right is None else min(right, UNBOUNDED)

    def pool_bytes(self, seq_lens: Ints) -> int:
        """Return the bytes of the pages of sequences, in all layers.

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
