# SPDX-License-Identifier: Apache-2.0
"""JSON in which every member counts."""

from __future__ import annotations

import json
from typing import Any


def loads(text: str | bytes) -> Any:
    """Return the value of a JSON text; ValueError also if an object has a name twice.

    JSON parsers would silently drop one of the two members.
    """
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parts = dict(pairs)
    if len(parts) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"an object must have each name once, got {twice!r:.60} again")
    return parts
