# SPDX-License-Identifier: Apache-2.0
"""Draws docs/images/concepts from plans, pools and transfers that the library makes. `--check`
writes nothing and fails where a picture is not what it would write."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from concepts import caches, strategies
from picture_files import write_pictures

IMAGES = Path(__file__).parents[1] / "docs" / "images" / "concepts"

PICTURES: Mapping[str, Callable[[], str]] = {
    "zigzag_prefix": strategies.zigzag_prefix,
    "paged_kv": caches.paged_kv,
    "strategies": strategies.strategies,
    "prefixes": strategies.prefixes,
    "prev_next": strategies.prev_next,
    "sparse_attention": caches.sparse_attention,
    "pools": caches.pools,
    "kv_transfer": caches.kv_transfer,
}


def main() -> int:
    return write_pictures(IMAGES, PICTURES, script="concept_pictures", purpose=__doc__)


if __name__ == "__main__":
    sys.exit(main())
