# SPDX-License-Identifier: Apache-2.0
"""Draws docs/images/concepts from plans, pools and transfers that the library makes. `--check`
writes nothing and fails where a picture is not what it would write."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from concepts import caches, strategies

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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for name, draw in PICTURES.items():
        path, drawn = IMAGES / f"{name}.svg", draw()
        if path.exists() and path.read_text() == drawn:
            continue
        stale.append(path.name)
        if not check:
            path.write_text(drawn)
    if stale and check:
        print(f"{', '.join(stale)}: out of date; run python scripts/concept_pictures.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
