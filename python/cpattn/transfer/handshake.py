# SPDX-License-Identifier: Apache-2.0
"""Handshake of two servers before they transfer, and the fields in which they differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from .layout import KVLayout

SCHEMA = "cpattn-kv-handshake/1"

Fact: TypeAlias = str | int | float | bool
_Layer: TypeAlias = tuple[bool, int]  # of the draft model, and its number


class _Difference(NamedTuple):
    field: str
    here: Fact | None
    there: Fact | None

    def __str__(self) -> str:
        return f"{self.field}: {self.here!r:.80} here, {self.there!r:.80} there"


class KVHandshakeError(ValueError):
    """Two servers differ in fields that must be equal.

    Attributes
    ----------
    differences : tuple of (field, here, there)
        Each such field with the values of both sides; None if a side does not give the field.

    Examples
    --------
    >>> from cpattn.transfer import KVEntry, KVHandshake, KVHandshakeError, KVLayout
    >>> def side(dtype):
    ...     entries = [KVEntry(i, "v", False, 4096 << i, 1024, 512, dtype=dtype) for i in range(3)]
    ...     return KVHandshake(KVLayout(entries, page_size=8), {"model": "m", "revision": 1})
    >>> try:
    ...     side("bfloat16").check(side("int8"))
    ... except KVHandshakeError as error:
    ...     print(error)
    KVHandshake.check: 1 field differs: dtype of v, layers 0-2: 'bfloat16' here, 'int8' there
    """

    def __init__(self, message: str, differences: tuple[_Difference, ...] = ()) -> None:
        super().__init__(message)
        self.differences = differences

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.differences)


@dataclass(frozen=True)
class KVHandshake:
    """Message of a server about its buffers and its engine, sent before planning.

    Sides may differ in pages, page sizes, strides, orders of heads and tokens, ranks and stages,
    which plans handle. For layers of both sides, kinds, dtypes and bytes per token and head must be
    equal, and so must all facts.

    Attributes
    ----------
    layout : KVLayout
        Buffers of the server.
    facts : mapping of str to str, number or bool
        Further values that must be equal, under agreed names: model, revision, version of the
        engine, rope scaling. A fact of only one side is a difference.

    Examples
    --------
    >>> import json
    >>> from cpattn.transfer import KVEntry, KVHandshake, KVLayout
    >>> layout = KVLayout([KVEntry(0, "k", False, 1 << 20, 1024, 512)], page_size=8)
    >>> message = json.dumps(KVHandshake(layout, {"model": "m"}).to_dict())
    >>> peer = KVHandshake.from_dict(json.loads(message))
    >>> peer.check(KVHandshake(layout, {"model": "m"}))
    >>> peer.differences(KVHandshake(layout, {"model": "n"}))[0].field
    'model'
    """

    layout: KVLayout
    facts: Mapping[str, Fact] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.layout, KVLayout):
            raise TypeError(
                f"KVHandshake: layout must be a KVLayout, got {type(self.layout).__name__}"
            )
        if not isinstance(self.facts, Mapping) or not all(
            isinstance(name, str) and isinstance(value, Fact) for name, value in self.facts.items()
        ):
            raise TypeError("KVHandshake: facts must map str to str, numbers or bools")
        object.__setattr__(self, "facts", dict(self.facts))

    def differences(self, peer: KVHandshake) -> tuple[_Difference, ...]:
        """Return each (field, here, there) that differs, fields of the layout first."""
        if not isinstance(peer, KVHandshake):
            raise TypeError(
                f"KVHandshake.differences: peer must be a KVHandshake, got {type(peer).__name__}"
            )
        found = _of_layouts(self.layout, peer.layout)
        for name in sorted({*self.facts, *peer.facts}):
            if (here := self.facts.get(name)) != (there := peer.facts.get(name)):
                found.append(_Difference(name, here, there))
        return tuple(found)

    def check(self, peer: KVHandshake) -> None:
        """Raise `KVHandshakeError`, with each field and both values, if any differ."""
        if found := self.differences(peer):
            many = "1 field differs" if len(found) == 1 else f"{len(found)} fields differ"
            raise KVHandshakeError(
                f"KVHandshake.check: {many}: {'; '.join(map(str, found))}", found
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the message as JSON types."""
        return {"schema": SCHEMA, "layout": self.layout.to_dict(), "facts": dict(self.facts)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> KVHandshake:
        """Read the message of `to_dict`; ValueError for another schema or a missing part."""
        names = ("schema", "layout", "facts")
        if not isinstance(fields, Mapping) or not all(name in fields for name in names):
            raise ValueError(f"KVHandshake.from_dict: fields must have {', '.join(names)}")
        if fields["schema"] != SCHEMA:
            raise ValueError(
                f"KVHandshake.from_dict: schema must be {SCHEMA}, got {fields['schema']!r:.60}"
            )
        return cls(KVLayout.from_dict(fields["layout"]), fields["facts"])


def _of_layouts(here: KVLayout, there: KVLayout) -> list[_Difference]:
    """Compare layer by layer; layers with the same difference are one field."""
    found: dict[tuple[str, Fact | None, Fact | None], list[_Layer]] = {}
    mine, theirs = _layers(here), _layers(there)
    both_draft = any(draft for draft, _ in mine) and any(draft for draft, _ in theirs)
    for layer in sorted({*mine, *theirs}):
        draft, number = layer
        shared = both_draft if draft else _answers(here, number) and _answers(there, number)
        if not shared:
            continue
        one, two = mine.get(layer, {}), theirs.get(layer, {})
        names = [name for name in one if name in two] if one and two else ["kinds"]
        for name in names:
            values = one.get(name), two.get(name)
            if values[0] != values[1] and "" not in values:  # "" is an unknown dtype
                found.setdefault((name, *values), []).append(layer)
    differences = [
        _Difference(f"{name}, {_named(layers)}", one, two)
        for (name, one, two), layers in found.items()
    ]
    heads = here.total_kv_heads, there.total_kv_heads
    if None not in heads and heads[0] != heads[1]:
        differences.insert(0, _Difference("total_kv_heads", *heads))
    return differences


def _answers(layout: KVLayout, layer: int) -> bool:
    return layout.layers is None or layout.layers[0] <= layer < layout.layers[1]


def _layers(layout: KVLayout) -> dict[_Layer, dict[str, Fact]]:
    """Return the fields of each layer that has buffers."""
    layers: dict[_Layer, dict[str, Fact]] = {}
    heads = max(1, (layout.total_kv_heads or 1) // layout.tp_size)
    for entry in layout.entries:
        fields = layers.setdefault((entry.is_draft, entry.layer_id), {"kinds": ""})
        fields["kinds"] = " ".join(sorted([*str(fields["kinds"]).split(), entry.kind]))
        if not entry.item_len:
            continue
        fields[f"dtype of {entry.kind}"] = entry.dtype
        fields[f"token_rows of {entry.kind}"] = entry.token_rows
        fields[f"layout_tag of {entry.kind}"] = entry.layout_tag or "rows"
        if entry.token_rows:
            one = entry.kind in ("index_k", "state")
            row = entry.item_len // layout.page_size // (1 if one else heads)
            fields[f"bytes of a token and head of {entry.kind}"] = row
        else:
            fields[f"page_size of {entry.kind}"] = layout.page_size
            fields[f"item_len of {entry.kind}"] = entry.item_len
    return layers


def _named(layers: Iterable[_Layer]) -> str:
    """Format layers as ``layers 0-3, 7``."""
    parts = []
    for kind in (False, True):
        numbers = [number for draft, number in layers if draft == kind]
        if not numbers:
            continue
        ends = [i for i, (a, b) in enumerate(pairwise(numbers)) if b != a + 1]
        runs = pairwise([-1, *ends, len(numbers) - 1])
        spans = [(numbers[first + 1], numbers[last]) for first, last in runs]
        text = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
        parts.append(f"{'draft ' * kind}layer{'s' * (len(numbers) > 1)} {text}")
    return " and ".join(parts)


KVHandshake.__module__ = KVHandshakeError.__module__ = "cpattn.transfer"
