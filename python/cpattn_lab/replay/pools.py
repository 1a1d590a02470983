# SPDX-License-Identifier: Apache-2.0
"""Empty KV pools of ranks and of decode processes."""

from __future__ import annotations

from typing import Any

import torch


def make_nan_pool(kind: type, num_pages: int, page_size: int, layers: range, **options: Any) -> Any:
    """Make a pool of pages 1 ... num_pages, and page 0 for padded tokens, of some of the layers.

    It starts as NaN, so that a read of an unwritten slot shows.

    kind : class of `cpattn.kv`
    options : its arguments besides sizes
    """
    pool: Any = kind(
        size=num_pages * page_size,
        page_size=page_size,
        num_layers=len(layers),
        start_layer=layers.start,
        container="torch",
        **options,
    )
    for buffers in pool._stored.values():
        if buffers.dtype != torch.int8:  # int8 has no NaN, but its scales have
            buffers.view(torch.uint8).fill_(0xFF)  # NaN in every floating dtype
    return pool
