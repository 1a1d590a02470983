# SPDX-License-Identifier: Apache-2.0
"""Values of options that name ranks, sequences and keys."""

from __future__ import annotations

from typing import Any

import click

from cpattn_terminal.limits import MAX_RANKS
from cpattn_terminal.options import parsed, shown


class CpSizes(click.ParamType):  # type: ignore[type-arg]
    """Numbers of ranks; see `parse_cp_sizes`."""

    name = "N | N,N,... | N..N"

    def convert(self, value: Any, param: Any, ctx: Any) -> list[int]:
        from ..cost_model.command import parse_cp_sizes

        if isinstance(value, list):
            return value
        try:
            sizes = parse_cp_sizes(value)
        except ValueError:
            sizes = [0]
        if not 1 <= min(sizes) <= max(sizes) <= MAX_RANKS:
            rule = (
                f"must be a number of ranks from 1 to {MAX_RANKS}, a list like 8,16,48 or a range"
            )
            self.fail(f"{rule} like 8..1024, got {shown(value)}", param, ctx)
        return sizes


class KeyWindow(click.ParamType):  # type: ignore[type-arg]
    """Keys before a token's own, or on both sides of it."""

    name = "N | LEFT,RIGHT"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not isinstance(value, str):
            return value
        texts = value.split(",")
        sides = [None if text == "all" else parsed(int, text) for text in texts]
        known = [
            text == "all" or (side is not None and side >= 0)
            for text, side in zip(texts, sides, strict=True)
        ]
        if len(sides) > 2 or not all(known):
            rule = "must be keys before a token's own, or before and behind, as 128,64 or all,0"
            self.fail(f"{rule}, got {shown(value)}", param, ctx)
        return sides[0] if len(sides) == 1 else (sides[0], sides[1])


class MeshShape(click.ParamType):  # type: ignore[type-arg]
    """Ranks in two dimensions: rows on a ring, and ranks of a row."""

    name = "RINGxHEADS"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        ring, _, heads = value.partition("x")
        sizes = parsed(int, ring) or 0, parsed(int, heads) or 0
        if min(sizes) < 1 or sizes[0] * sizes[1] > MAX_RANKS:
            rule = f"must be two numbers whose product is 1 to {MAX_RANKS} ranks, as 4x2"
            self.fail(f"{rule}, got {shown(value)}", param, ctx)
        return sizes


class DecodedSequences(click.ParamType):  # type: ignore[type-arg]
    """Number of sequences that decode, or "recorded": the lengths of a capture."""

    name = "sequences"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        number = parsed(int, value)
        if value != "recorded" and not 1 <= (number or 0) <= 1 << 16:
            self.fail(f"must be from 1 to {1 << 16}, or recorded, got {shown(value)}", param, ctx)
        return number or value
