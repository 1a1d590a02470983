# SPDX-License-Identifier: Apache-2.0
"""JSON of which everything is judged."""

from __future__ import annotations

import json
from typing import Any


def loads(text: str | bytes) -> Any:
    """The value of a text in JSON; ValueError also where an object has a name twice.

    One of the two would be dropped without a word.
    """
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parts = dict(pairs)
    if len(parts) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"an object must have each name once, got {twice!r:.60} again")
    return parts
