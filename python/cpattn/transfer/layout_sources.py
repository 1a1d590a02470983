# SPDX-License-Identifier: Apache-2.0
"""Entries of a layout from a server's data: pools, and the flat lists of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from reprlib import Repr
from typing import Any, NamedTuple, NoReturn

from .. import _core
from .._arguments import has, integer, items, part
from .entry import KVEntry

FUNCTION = "KVLayout.from_kv_args"
KINDS = ("k", "v", "index_k")
DRAFT_IDS = 1_000_000  # engines that number buffers begin draft layers here


OF_A_POOL = ("kinds", "start_layer", "num_layers", "num_kv_heads", "page_size")


def fields_of(entry: Any) -> tuple[Any, ...]:
    """Return the fields of an entry that a `KVLayout` was given."""
    try:
        return tuple(KVEntry(*entry))
    except Exception as error:
        raise TypeError(
            f"KVLayout: entries must be KVEntry(layer_id, kind, is_draft, addr, nbytes, item_len, "
            f"token_rows=True, dtype='', page_stride=None, kv_layout='NHD', layout_tag=''), "
            f"got {_shown(entry)}"
        ) from error


def _shown(entry: Any) -> str:
    """Show a tuple by its first items, any other object by its type."""
    if not isinstance(entry, tuple):
        return repr(type(entry).__name__)
    shown = Repr()
    shown.maxtuple, shown.maxother = 8, 40
    return shown.repr(entry)


def check_pool(name: str, pool: Any) -> None:
    """Raise TypeError if an object is no pool."""
    missing = [name for name in (*OF_A_POOL, "get_contiguous_buf_infos") if not has(pool, name)]
    if missing:
        raise TypeError(
            f"KVLayout.from_pool: {name} must be a KV pool, got {type(pool).__name__}, which has "
            f"no {', '.join(missing)}"
        )


def pool_entries(pool: Any, *, is_draft: bool) -> list[KVEntry]:
    """Return the buffers of a pool, in the pool's order."""
    first = 0 if is_draft else pool.start_layer
    infos = zip(*pool.get_contiguous_buf_infos(), strict=True)
    dtypes = _optional(pool, "dtypes", {}, Mapping, "a dict of the dtype of each kind")
    whole_pages = _optional(pool, "whole_page_kinds", (), list | tuple, "a list of kinds")
    strides = _optional(pool, "page_strides", {}, Mapping, "a dict of the stride of each kind")
    order = _optional(pool, "kv_layout", "NHD", str, "a str")
    tags = _optional(pool, "layout_tags", {}, Mapping, "a dict of the layout_tag of each kind")
    entries = []
    for kind in pool.kinds:
        tag = tags.get(kind, "")
        rows = kind not in whole_pages and not tag
        rest = rows, dtypes.get(kind, ""), strides.get(kind), order if rows else "NHD", tag
        for layer in range(first, first + pool.num_layers):
            addr, nbytes, item_len = next(infos)
            entries.append(KVEntry(layer, kind, is_draft, addr, nbytes, item_len, *rest))
    return entries


def _optional(pool: Any, name: str, default: Any, kind: Any, rule: str) -> Any:
    """Return an attribute that pools of other packages may lack."""
    value = getattr(pool, name, default)
    if not isinstance(value, kind):
        raise TypeError(
            f"KVLayout.from_pool: {name} of a pool must be {rule}, got {type(value).__name__}"
        )
    return value


class Stage(NamedTuple):
    """Target layers of a server, their total number, and draft layers."""

    start: int
    end: int
    total: int
    num_draft: int

    @property
    def layers(self) -> tuple[int, int] | None:
        """Range of layers for `KVLayout`, or None for all layers."""
        return None if (self.start, self.end) == (0, self.total) else (self.start, self.end)


def stage_of(
    args: Any,
    num_groups: int,
    layers: tuple[int, int] | None,
    total_layers: int | None,
    draft_layers: int | None,
) -> Stage:
    """Find the layers of a stage in an engine's arguments, or in arguments of the caller."""
    if total_layers is not None:
        total_layers = integer(total_layers, FUNCTION, "total_layers")
    total = total_layers or number(args, "hidden_kv_layers", "total_kv_layers")
    if not total:
        refuse("total_layers must be given: hidden_kv_layers and total_kv_layers are not set")
    if draft_layers is None:
        of_entries = (number(args, "num_draft_entries") or 0) // num_groups
        draft_layers = number(args, "draft_kv_layers") or of_entries
    else:
        draft_layers = integer(draft_layers, FUNCTION, "draft_layers")
    if layers is not None:
        pair = items(layers, FUNCTION, "layers")
        if len(pair) != 2:
            refuse(f"layers must be a pair, got {len(pair)} values")
        start, end = (integer(layer, FUNCTION, "layers") for layer in pair)
    else:
        first = part(args, "prefill_start_layer", FUNCTION, "kv_args")
        start = integer(first, FUNCTION, "prefill_start_layer")
        known_end = number(args, "prefill_end_layer")
        if known_end is None and ids_of(args):
            refuse("layers must be given with kv_layer_ids: prefill_end_layer is not set")
        ptrs = items(part(args, "kv_data_ptrs", FUNCTION, "kv_args"), FUNCTION, "kv_data_ptrs")
        guess = start + len(ptrs) // num_groups - draft_layers
        end = guess if known_end is None else known_end
    if not 0 <= start <= end <= total:
        refuse(f"layers [{start}, {end}) must lie within the model's {total}")
    return Stage(start, end, total, draft_layers)


def args_entries(args: Any, num_groups: int, stage: Stage) -> list[KVEntry]:
    """Return the buffers of an engine's arguments, by their ids if any, else in groups."""
    names = ("kv_data_ptrs", "kv_data_lens", "kv_item_lens")
    lists = [
        _core.address_list(f"{FUNCTION}: {name}", values)
        for name, values in zip(names, part(args, names, FUNCTION, "kv_args"), strict=True)
    ]
    if len({len(values) for values in lists}) > 1:
        refuse(
            "kv_data_ptrs, kv_data_lens and kv_item_lens must be equally many, got "
            f"{', '.join(str(len(values)) for values in lists)}"
        )
    infos = list(zip(*lists, strict=True))
    if ids := ids_of(args):
        return entries_with_ids(infos, ids, stage)
    counts = ((False, stage.start, stage.end - stage.start), (True, 0, stage.num_draft))
    expected = num_groups * sum(count for _, _, count in counts)
    if len(infos) != expected:
        refuse(
            f"kv_data_ptrs must hold {num_groups} group(s) of layers [{stage.start}, {stage.end}) "
            f"and of {stage.num_draft} draft layer(s), {expected} in all, got {len(infos)}"
        )
    buffers = iter(infos)
    entries = []
    for is_draft, first, count in counts:
        for kind in KINDS[:num_groups]:
            group = list(islice(buffers, count))
            if len({item_len for _, _, item_len in group}) > 1:
                lengths = [item_len for _, _, item_len in group]
                refuse(
                    f"kv_item_lens of group {kind} of {'draft' if is_draft else 'target'} layers "
                    f"must be equal, got {lengths}"
                )
            entries += [
                KVEntry(layer, kind, is_draft, *info) for layer, info in enumerate(group, first)
            ]
    return entries


def entries_with_ids(
    infos: Sequence[tuple[int, int, int]], ids: Sequence[int], stage: Stage
) -> list[KVEntry]:
    """Return entries in which the n-th buffer of a layer has the n-th kind."""
    if len(ids) != len(infos):
        refuse(f"kv_layer_ids must have an id for each of {len(infos)} buffers, got {len(ids)}")
    seen: dict[int, int] = {}
    entries = []
    for layer, info in zip(ids, infos, strict=True):
        kind = seen[layer] = seen.get(layer, -1) + 1
        if kind == len(KINDS):
            refuse(
                f"kv_layer_ids must name a layer {len(KINDS)} times at most, got more of {layer}"
            )
        is_draft = layer >= DRAFT_IDS
        if not is_draft and not stage.start <= layer < stage.end:
            refuse(f"kv_layer_ids must lie in [{stage.start}, {stage.end}), got {layer}")
        entries.append(KVEntry(layer - DRAFT_IDS * is_draft, KINDS[kind], is_draft, *info))
    return entries


def attribute(args: Any, *names: str) -> Any:
    """Return the first of the attributes that is present and not None."""
    try:
        values = [getattr(args, name, None) for name in names]
    except Exception as error:
        raise TypeError(
            f"{FUNCTION}: kv_args must have {', '.join(names)}, got {type(args).__name__}"
        ) from error
    return next((value for value in values if value is not None), None)


def number(args: Any, *names: str) -> int | None:
    """Return the first attribute that is present as an int, or None."""
    value = attribute(args, *names)
    return None if value is None else integer(value, FUNCTION, " or ".join(names))


def ids_of(args: Any) -> list[int]:
    """Return `kv_layer_ids`, if set."""
    ids = attribute(args, "kv_layer_ids")
    return [] if ids is None else _core.ints(ids, FUNCTION, "kv_layer_ids")


def refuse(message: str) -> NoReturn:
    raise ValueError(f"{FUNCTION}: {message}")
