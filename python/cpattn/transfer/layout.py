# SPDX-License-Identifier: Apache-2.0
"""The buffers of one side of a transfer, each with the layer and the kind that it holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .. import _core

__all__ = ["KVEntry", "KVLayout"]


class KVEntry(NamedTuple):
    """A registered buffer: the pages of one kind of one layer.

    Attributes
    ----------
    layer_id : int
        Of the whole model, whatever stage or subset of layers is here; draft layers count from
        0 again.
    kind : str
        "k", "v", "index_k" or "state". An MLA latent is "k", its rope part "v".
    is_draft : bool
        Of a draft (MTP, EAGLE) model.
    addr, nbytes : int
        Where it is, and how long.
    item_len : int
        Bytes of a page.
    token_rows : bool
        Whether a page is a row for each of its tokens, in order. If not (pages of FP8 index
        keys with their scales behind), pages are sent whole or the plan is refused.
    """

    layer_id: int
    kind: str
    is_draft: bool
    addr: int
    nbytes: int
    item_len: int
    token_rows: bool = True


class KVLayout(_core.KVLayout):
    """What a side of a transfer has, and where: made once per server, a comparable value.

    Parameters
    ----------
    entries : iterable of KVEntry
        In the order in which their blocks shall be sent.
    page_size : int
        Tokens of a page.
    tp_rank, tp_size : int
        The attention tensor parallelism of this side.
    total_kv_heads : int, optional
        Heads of K and V of the whole model; 1 for MLA, whose latent all ranks hold. Ranks have
        equal shares in order; with more ranks than heads, neighbours have the same head.
        Needed with tp_size > 1.
    layers : pair of int, optional
        The target layers ``first, ..., end - 1`` that this side answers for, all of whose
        buffers are here: those of its pipeline stage. Default: all layers of the model.
    dcp_rank, dcp_size, dcp_interleave : int
        Of a destination with decode context parallelism: token t of a sequence is kept by rank
        ``t // dcp_interleave % dcp_size``, and no other, behind the others it keeps.

    Raises
    ------
    ValueError
        For what contradicts itself: the same buffer twice, a number of bytes that is no whole
        number of pages, a layer outside `layers`, heads that ranks cannot share equally.

    Examples
    --------
    >>> layout = KVLayout([KVEntry(0, "k", False, 1 << 48, 4608, 512)], page_size=8)
    >>> layout
    KVLayout(1 buffer of 1 layer, page_size=8)
    >>> KVLayout.from_dict(layout.to_dict()) == layout
    True
    """

    def __init__(
        self,
        entries: Iterable[KVEntry | Sequence[Any]],
        page_size: int,
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        total_kv_heads: int | None = None,
        layers: tuple[int, int] | None = None,
        dcp_rank: int = 0,
        dcp_size: int = 1,
        dcp_interleave: int = 1,
    ) -> None:
        super().__init__(
            [tuple(KVEntry(*entry)) for entry in entries], page_size, tp_rank, tp_size,
            total_kv_heads, layers, dcp_rank, dcp_size, dcp_interleave,
        )  # fmt: skip

    @property
    def entries(self) -> tuple[KVEntry, ...]:
        """The buffers, as given."""
        return tuple(KVEntry(*entry) for entry in self._entries)

    def to_dict(self) -> dict[str, Any]:
        """Every argument by name, of types that JSON has: how a layout goes to the peer."""
        fields = {name: getattr(self, name) for name in DEFAULTS}
        layers = self.layers
        return {
            "entries": [list(entry) for entry in self._entries],
            "page_size": self.page_size,
            **fields,
            "layers": None if layers is None else list(layers),
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> KVLayout:
        """The layout whose `to_dict` this is."""
        values = dict(fields)
        layers = values.pop("layers", None)
        return cls(**values, layers=None if layers is None else tuple(layers))

    def __repr__(self) -> str:
        entries = self._entries
        num_layers = len({(is_draft, layer_id) for layer_id, _, is_draft, *_ in entries})
        what = [count(len(entries), "buffer") + " of " + count(num_layers, "layer")]
        what.append(f"page_size={self.page_size}")
        for name, default in DEFAULTS.items():
            if (value := getattr(self, name)) != default:
                what.append(f"{name}={value}")
        return f"KVLayout({', '.join(what)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return KVLayout.from_dict, (self.to_dict(),)


DEFAULTS: dict[str, Any] = {
    "tp_rank": 0,
    "tp_size": 1,
    "total_kv_heads": None,
    "layers": None,
    "dcp_rank": 0,
    "dcp_size": 1,
    "dcp_interleave": 1,
}


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


KVEntry.__module__ = KVLayout.__module__ = "cpattn"
