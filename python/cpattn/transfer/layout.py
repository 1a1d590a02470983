# SPDX-License-Identifier: Apache-2.0
"""The buffers of one side of a transfer, each with its layer and kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .. import _core
from .._arguments import at_least, count, flag, integer, items, part
from .entry import KVEntry
from .layout_sources import args_entries, check_pool, fields_of, number, pool_entries, stage_of


class KVLayout(_core.KVLayout):
    """Buffers of one side of a transfer; made once per server and comparable by value.

    Parameters
    ----------
    entries : iterable of KVEntry
        Buffers in the order in which to send their blocks.
    page_size : int
        Tokens per page.
    tp_rank, tp_size : int
        Rank and size of this side's attention tensor parallelism.
    total_kv_heads : int, optional
        KV heads of the whole model; 1 for MLA, whose latent all ranks hold. Ranks have equal shares
        in order; if there are more ranks than heads, neighbouring ranks have the same head.
        Required with tp_size > 1.
    layers : pair of ints, optional
        Target layers ``first, ..., end - 1`` of this side's pipeline stage; the entries must
        include all their buffers. Default: all layers of the model.
    dcp_rank, dcp_size, dcp_interleave : int
        Decode context parallelism of a destination: only rank ``t // dcp_interleave % dcp_size``
        keeps token t of a sequence; a rank stores its tokens without gaps.
    shard_rank, shard_size : int
        Striping of pools by pages (`cpattn.kv.PageInterleave`): page l of the group is page
        ``l // shard_size`` of rank ``l % shard_size``. Page lists then name pages of the group and
        are the same for all its ranks. DCP excludes it.

    Raises
    ------
    ValueError
        If a buffer comes twice, the bytes of a buffer are no whole number of pages, a layer is
        outside `layers`, ranks cannot share the heads equally, striped pages meet DCP, or pages of
        heads (HND) have another length or no `total_kv_heads`.

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
        shard_rank: int = 0,
        shard_size: int = 1,
    ) -> None:
        values = [fields_of(entry) for entry in items(entries, "KVLayout", "entries")]
        super().__init__(
            values, page_size, tp_rank, tp_size,
            total_kv_heads, layers, dcp_rank, dcp_size, dcp_interleave, shard_rank, shard_size,
        )  # fmt: skip
        self._pools: tuple[object, ...] = ()  # keeps their memory alive

    @classmethod
    def from_pool(
        cls,
        pool: Any,
        draft_pool: Any | None = None,
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        total_kv_heads: int | None = None,
        layers: tuple[int, int] | None = None,
        dcp_rank: int = 0,
        dcp_size: int = 1,
        dcp_interleave: int = 1,
        shard_rank: int = 0,
        shard_size: int = 1,
    ) -> KVLayout:
        """Describe a pool, one kind after the other, then the pool of a draft model.

        The layout keeps the pools alive; so do its copies in this process and the plans with this
        layout as their source. `to_dict` and pickles give other processes only the addresses.

        Parameters
        ----------
        pool, draft_pool : MHATokenToKVPool or MLATokenToKVPool
            Or any object with ``kinds``, ``start_layer``, ``num_layers``, ``num_kv_heads``,
            ``page_size`` and ``get_contiguous_buf_infos()``. Optional attributes: ``dtypes``, a
            dict from kind to dtype; ``whole_page_kinds``, a list of kinds without rows of tokens;
            ``page_strides`` and ``layout_tags``, dicts from kind to `KVEntry.page_stride` and
            `KVEntry.layout_tag`; ``kv_layout`` as in `KVEntry`; an int ``kv_lora_rank``, which
            marks a pool of latents with one KV head.
        tp_rank, tp_size, total_kv_heads
            See `KVLayout`. Default of total_kv_heads: the heads of the pool; MHA with
            ``tp_size > 1`` requires it.
        layers
            See `KVLayout`. A pipeline stage must state its layers, usually
            ``(pool.start_layer, pool.end_layer)``. Default: the pool is the whole model.
        dcp_rank, dcp_size, dcp_interleave, shard_rank, shard_size
            See `KVLayout`.

        Returns
        -------
        KVLayout

        Raises
        ------
        TypeError
            If a pool lacks a required attribute, or a number is no integer.
        ValueError
            If the pools have different page sizes, the heads differ from those of the pool, or
            `KVLayout` refuses an argument.

        Examples
        --------
        >>> import cpattn
        >>> pool = cpattn.kv.MHATokenToKVPool(
        ...     size=64, page_size=16, num_layers=2, num_kv_heads=1, head_dim=32)
        >>> KVLayout.from_pool(pool, tp_rank=1, tp_size=4, total_kv_heads=4)
        KVLayout(4 buffers of 2 layers, page_size=16, tp_rank=1, tp_size=4, total_kv_heads=4)
        """
        function = "KVLayout.from_pool"
        for name, value in (("pool", pool), ("draft_pool", draft_pool)):
            if value is not None or name == "pool":
                check_pool(name, value)
        tp_size = at_least(1, tp_size, function, "tp_size")
        if total_kv_heads is not None:
            total_kv_heads = integer(total_kv_heads, function, "total_kv_heads")
        if draft_pool is not None and draft_pool.page_size != pool.page_size:
            raise ValueError(
                f"{function}: page_size must be that of the draft pool, "
                f"got {pool.page_size} and {draft_pool.page_size}"
            )
        if isinstance(getattr(pool, "kv_lora_rank", None), int):
            total_kv_heads = 1
        elif tp_size == 1 and total_kv_heads is None:
            total_kv_heads = pool.num_kv_heads
        entries = pool_entries(pool, is_draft=False)
        if draft_pool is not None:
            entries += pool_entries(draft_pool, is_draft=True)
        layout = cls(
            entries, pool.page_size, tp_rank=tp_rank, tp_size=tp_size,
            total_kv_heads=total_kv_heads, layers=layers, dcp_rank=dcp_rank, dcp_size=dcp_size,
            dcp_interleave=dcp_interleave, shard_rank=shard_rank, shard_size=shard_size,
        )  # fmt: skip
        layout._pools = pool, draft_pool
        if (heads := max(1, (total_kv_heads or 0) // tp_size)) != pool.num_kv_heads:
            raise ValueError(
                f"{function}: total_kv_heads {total_kv_heads} over tp_size {tp_size} must be the "
                f"{pool.num_kv_heads} of the pool, got {heads}"
            )
        return layout

    @classmethod
    def from_kv_args(
        cls,
        kv_args: Any,
        *,
        is_mla: bool,
        tp_size: int = 1,
        total_layers: int | None = None,
        draft_layers: int | None = None,
        layers: tuple[int, int] | None = None,
        dcp_interleave: int = 1,
        shard_rank: int = 0,
        shard_size: int = 1,
    ) -> KVLayout:
        """Describe the KV buffers in the ``KVArgs`` of an engine.

        Buffers are groups of layers (K, V and, for MLA with an indexer, index keys), then the same
        groups of draft layers. If ``kv_layer_ids`` is set, it names the layer of each buffer
        instead, with draft layers from 1,000,000 on. State components are not included.

        Parameters
        ----------
        kv_args : object
            Object with ``kv_data_ptrs``, ``kv_data_lens``, ``kv_item_lens``, ``page_size``,
            ``prefill_start_layer`` and, where they are set, ``prefill_end_layer``,
            ``kv_buf_groups``, ``hidden_kv_layers`` or ``total_kv_layers``, ``draft_kv_layers`` or
            ``num_draft_entries``, ``kv_layer_ids``, ``engine_rank``, ``total_kv_head_num``,
            ``dcp_rank`` and ``dcp_size``.
        is_mla : bool
            Whether all ranks hold the same latent, in ``kv_buf_groups`` groups. False: groups are K
            and V.
        tp_size : int
            Size of attention tensor parallelism; the rank is ``engine_rank % tp_size``.
        total_layers : int, optional
            Target layers of the whole model, if `kv_args` does not give them.
        draft_layers : int, optional
            Number of draft layers, if there are any and `kv_args` does not give it.
        layers : pair of int, optional
            See `KVLayout`. Default: the layers of the stage.
        dcp_interleave, shard_rank, shard_size : int
            See `KVLayout`.

        Returns
        -------
        KVLayout

        Raises
        ------
        TypeError
            If `kv_args` lacks one of the first five attributes, or an attribute has another type.
        ValueError
            If the buffers do not match the groups and layers, the stage exceeds the model, or item
            lengths differ within a group.

        Examples
        --------
        >>> from cpattn.transfer.sglang_0_5_23 import KVArgs
        >>> args = KVArgs(kv_data_ptrs=[4096, 8192], kv_data_lens=[1024, 1024],
        ...               kv_item_lens=[512, 512], page_size=8, prefill_start_layer=0,
        ...               total_kv_layers=1)
        >>> layout = KVLayout.from_kv_args(args, is_mla=False)
        >>> [(entry.layer_id, entry.kind) for entry in layout.entries]
        [(0, 'k'), (0, 'v')]
        """
        function = "KVLayout.from_kv_args"
        is_mla = flag(is_mla, function, "is_mla")
        num_groups = (number(kv_args, "kv_buf_groups") or 1) if is_mla else 2
        if not 1 <= num_groups <= 3:
            raise ValueError(f"{function}: kv_buf_groups must be 1, 2 or 3, got {num_groups}")
        tp_size = at_least(1, tp_size, function, "tp_size")
        stage = stage_of(kv_args, num_groups, layers, total_layers, draft_layers)
        return cls(
            args_entries(kv_args, num_groups, stage),
            part(kv_args, "page_size", function, "kv_args"),
            tp_rank=(number(kv_args, "engine_rank") or 0) % tp_size, tp_size=tp_size,
            total_kv_heads=1 if is_mla else number(kv_args, "total_kv_head_num") or None,
            layers=stage.layers, dcp_rank=number(kv_args, "dcp_rank") or 0,
            dcp_size=number(kv_args, "dcp_size") or 1, dcp_interleave=dcp_interleave,
            shard_rank=shard_rank, shard_size=shard_size,
        )  # fmt: skip

    @property
    def entries(self) -> tuple[KVEntry, ...]:
        """The buffers, in the given order."""
        return tuple(KVEntry(*entry) for entry in self._entries)

    def to_dict(self) -> dict[str, Any]:
        """Return all arguments by name as JSON types, to send to the peer."""
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
        """Make a layout from its `to_dict`; raises what `KVLayout` raises."""
        if not isinstance(fields, Mapping):
            raise TypeError(
                f"KVLayout.from_dict: fields must be a mapping, got {type(fields).__name__}"
            )
        return cls(**fields)

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

    def __copy__(self) -> KVLayout:
        return self  # a value, and one that keeps its pools

    def __deepcopy__(self, memo: object) -> KVLayout:
        return self


DEFAULTS: dict[str, Any] = KVLayout.__init__.__kwdefaults__ or {}
KVLayout.__module__ = "cpattn.transfer"
