# SPDX-License-Identifier: Apache-2.0
"""Names for the buffers of a server's KV cache."""

from __future__ import annotations


def kv_list(layers: range, groups: str, drafts: int = 0) -> list[str]:
    """What the buffers of a server hold, in the order in which it lists them."""
    target = [f"{group}{layer}" for group in groups for layer in layers]
    return target + [f"d{group}{layer}" for group in groups for layer in range(drafts)]
