# SPDX-License-Identifier: Apache-2.0
"""Units of several rows: their computation by ranks, and their writes into pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...findings import NotUsable
from ..document import SCHEMA
from ..intervals import Ints, each, ints, offsets
from .context_parallel import from_metadata
from .pcp import from_segments, segment_columns
from .runs import parts_sent, requests_of, tokens_of, write_runs


def from_halos(
    metadata: Sequence[Any] | Any,
    halos: Sequence[Any],
    extend_lens: Sequence[int],
    prefix_lens: Sequence[int] | None = None,
    *,
    window: int,
    ratio: int = 1,
) -> dict[str, Any]:
    """Make a document of the halo plans of all ranks, in their order.

    Rows travel by the plans: the tokens that a rank sends arrive at the other one. Each unit counts
    as made of the tokens at the places where the rank looks for its rows.

    Parameters
    ----------
    metadata : sequence of objects, or layout
        Metadata as for `context_parallel.from_metadata`, with ``local_q_indices``; or one object
        with ``segments`` of all ranks as for `pcp.from_segments`, such as a ``PCPLayout``.
    halos : sequence of objects
        `cpattn.context_parallel.halo.HaloPlan` of each rank, or objects with the same fields.
    extend_lens, prefix_lens : ints [bs]
        New and cached tokens of each request. Default of the latter: none are cached.
    window, ratio : int
        Rows of a unit, and rows from one unit to the next.

    Returns
    -------
    dict
        A document of the schema `SCHEMA`.

    Raises
    ------
    NotUsable
        As for `context_parallel.from_metadata` and `pcp.from_segments`.

    Examples
    --------
    >>> import cpattn
    >>> from cpattn.context_parallel.halo import plan_halo
    >>> from cpattn_proof import lint
    >>> plans = cpattn.build_cp_metadata_all_ranks([30], [35], cp_size=2)
    >>> halos = [plan_halo(plan, window=8, ratio=4) for plan in plans]
    >>> lint(from_halos(plans, halos, [30], [5], window=8, ratio=4)).proved
    True
    """
    own: list[Ints]  # tokens of each rank
    if hasattr(metadata, "segments"):
        cached = [0] * len(extend_lens) if prefix_lens is None else prefix_lens
        document = from_segments(metadata.segments, extend_lens, cached)
        own = [
            _tokens(*map(ints, columns[1:3])) for columns in map(segment_columns, metadata.segments)
        ]
    else:
        document = from_metadata(metadata, extend_lens, prefix_lens)
        own = [ints(one.local_q_indices) for one in metadata]
    extend = ints([request["extend"] for request in document["requests"]])
    prefix = ints([request["prefix"] for request in document["requests"]])
    sent = [parts_sent(tokens, halo) for tokens, halo in zip(own, halos, strict=True)]
    for rank, halo in enumerate(halos):
        arrived = np.concatenate([own[rank], *(parts[rank] for parts in sent)])
        request, position = tokens_of(arrived, extend, prefix)
        request = np.concatenate([request, ints(halo.cached_request)])
        position = np.concatenate([position, ints(halo.cached_position)])
        at = ints(halo.extended_indices)
        document["ranks"][rank]["units"] = _unit_runs(halo, request[at], position[at])
    document["units"] = {"ratio": ratio, "window": window}
    return document


def from_unit_writes(
    halos: Sequence[Any],
    plans: Sequence[Any],
    extend_lens: Sequence[int],
    prefix_lens: Sequence[int],
    *,
    ratio: int,
    block_tables: Sequence[Any],
    page_size: int,
    placement: Any = None,
    num_pages: int | None = None,
) -> dict[str, Any]:
    """Make a document of the writes of ranks into pools of compressed units.

    Units are the tokens of the document: the units that a rank sends arrive at the other one, which
    writes them to its slots for them.

    Parameters
    ----------
    halos : sequence of objects
        Plans as for `from_halos`; ``unit_request`` and ``unit_ids`` are read.
    plans : sequence of objects
        `cpattn.context_parallel.halo.RelayoutPlan` of each rank, from `cpattn.kv.plan_units`, or
        objects with the same fields.
    extend_lens, prefix_lens : ints [bs]
        New and cached tokens of each request.
    ratio : int
        Tokens from one unit to the next.
    block_tables : sequence of ints [bs, pages]
        For each rank, the pages of each request, as for `cpattn.kv.plan_units`.
    page_size : int
        Units per page.
    placement : cpattn.kv.TokenInterleave or PageInterleave, optional
        Placement of units, or an object with the same fields; without it, all ranks keep each unit.
    num_pages : int, optional
        Pages of a pool, or of all pools together with striped pages; without it, bounds are not
        checked.

    Returns
    -------
    dict
        A document of the schema `SCHEMA`.

    Raises
    ------
    NotUsable
        If a rank receives another number of units than it expects or has slots for, sends units
        that it lacks, or lengths or ranks disagree.

    Examples
    --------
    >>> import cpattn
    >>> from cpattn.context_parallel.halo import plan_halo
    >>> from cpattn.kv import plan_units
    >>> from cpattn_proof import lint
    >>> metadata = cpattn.build_cp_metadata_all_ranks([30], [35], cp_size=2)
    >>> halos = [plan_halo(one, window=8, ratio=4) for one in metadata]
    >>> pools = {"ratio": 4, "page_size": 16}
    >>> plans = [plan_units(one, block_tables=[[5]], **pools) for one in metadata]
    >>> lint(from_unit_writes(halos, plans, [30], [5], block_tables=[[[5]]] * 2, **pools)).proved
    True
    """
    sizes = [len(halos), len(plans), len(block_tables)]
    if len(set(sizes)) > 1:
        raise NotUsable(
            f"from_unit_writes: halos, plans and block_tables must be of as many ranks, got {sizes}"
        )
    if len(extend_lens) != len(prefix_lens) or ratio < 1:
        raise NotUsable(
            "from_unit_writes: ratio must be at least 1, and extend_lens and prefix_lens as long "
            f"as each other, got {ratio}, {len(extend_lens)} and {len(prefix_lens)}"
        )
    first = ints(prefix_lens) // ratio
    counts = (ints(prefix_lens) + ints(extend_lens)) // ratio - first
    sent = []
    for rank, (halo, plan) in enumerate(zip(halos, plans, strict=True)):
        units = np.stack([ints(halo.unit_request), ints(halo.unit_ids)])
        indices, ends = ints(plan.send_indices), offsets(ints(plan.send_counts))
        if ((indices < 0) | (indices >= units.shape[1])).any():
            raise NotUsable(
                f"from_unit_writes: rank {rank} sends units beyond the {units.shape[1]} of its halo"
            )
        if len(ends) != len(plans) + 1 or ends[-1] != len(indices):
            raise NotUsable(
                f"from_unit_writes: send_counts of rank {rank} must be of {len(plans)} ranks, "
                f"together {len(indices)}, got {np.diff(ends).tolist()}"
            )
        sent.append(np.split(units[:, indices], ends[1:-1], axis=1))
    in_stripes = placement is not None and not hasattr(placement, "interleave")
    ranks: list[dict[str, Any]] = []
    for rank, plan in enumerate(plans):
        request, unit = np.concatenate([parts[rank] for parts in sent], axis=1)
        slots = ints(plan.recv_indices)
        arriving = [parts[rank].shape[1] for parts in sent]
        if arriving != ints(plan.recv_counts).tolist() or len(slots) != len(unit):
            raise NotUsable(
                f"from_unit_writes: rank {rank} receives {arriving} units, awaits "
                f"{list(plan.recv_counts)} and has {len(slots)} slots"
            )
        if in_stripes:
            slots = ints(placement.global_index(rank, slots))
        part = {"writes": write_runs(request, unit, slots)}
        tables = {"tables": [ints(row).tolist() for row in block_tables[rank]]}
        ranks.append(part if in_stripes else part | tables)
    cache: dict[str, Any] = {"page_size": page_size}
    if in_stripes:
        cache |= {"shared": True, "tables": [ints(row).tolist() for row in block_tables[0]]}
    elif placement is not None:
        cache |= {"shards": placement.shard_size, "interleave": placement.interleave}
    return {
        "schema": SCHEMA,
        "requests": requests_of(counts, first),
        "cache": cache | ({} if num_pages is None else {"num_pages": num_pages}),
        "ranks": ranks,
    }


def _tokens(start: Ints, stop: Ints) -> Ints:
    """Return the tokens of segments, in order."""
    segment, into = each(stop - start)
    return start[segment] + into


def _unit_runs(halo: Any, request: Ints, position: Ints) -> dict[str, list[int]]:
    """Return runs of the tokens of each unit, from the tokens of the extended rows."""
    starts, lens = ints(halo.unit_starts), ints(halo.unit_lens)
    follows = np.zeros(len(position) + 1, bool)
    follows[1:-1] = (np.diff(position) == 1) & (np.diff(request) == 0)
    breaks = np.flatnonzero(~follows)
    first = np.searchsorted(breaks, starts, side="right")
    inner = np.searchsorted(breaks, starts + lens, side="left") - first  # within the unit
    unit, into = each(inner + 1)
    inside = np.append(breaks, len(position))
    begin = np.where(into == 0, starts[unit], inside[first[unit] + into - 1])
    end = np.where(into == inner[unit], (starts + lens)[unit], inside[first[unit] + into])
    return {
        "request": ints(halo.unit_request)[unit].tolist(),
        "unit": ints(halo.unit_ids)[unit].tolist(),
        "position": position[begin].tolist(),
        "count": (end - begin).tolist(),
        "source": request[begin].tolist(),
    }
