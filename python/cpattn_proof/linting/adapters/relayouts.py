# SPDX-License-Identifier: Apache-2.0
"""Rows on their way from one layout of a batch to another, as between layers of two kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..intervals import ints, offsets
from .context_parallel import from_metadata
from .runs import parts_sent, row_runs


def from_relayouts(
    plans: Sequence[Any],
    source: Sequence[Any],
    target: Sequence[Any],
    extend_lens: Sequence[int],
    prefix_lens: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Make a document of the rows that arrive where another kind of layers computes.

    Rows travel by the plans. A rank counts as having the tokens that arrive in the places where its
    target metadata has tokens. One all-to-all sends as many rows as each plan has.

    Parameters
    ----------
    plans : sequence of objects
        `cpattn.context_parallel.halo.RelayoutPlan` of each rank, or objects with the same fields.
    source, target : sequences of objects
        Metadata of each rank, as for `context_parallel.from_metadata`, with ``local_q_indices``.
    extend_lens, prefix_lens : ints [bs]
        New and cached tokens of each request. Default of the latter: none are cached.

    Returns
    -------
    dict
        A document of the schema `SCHEMA`.

    Raises
    ------
    NotUsable
        See `context_parallel.from_metadata`.

    Examples
    --------
    >>> import cpattn
    >>> from cpattn.context_parallel.halo import plan_relayout
    >>> from cpattn_proof import lint
    >>> states, attention = (
    ...     cpattn.build_cp_metadata_all_ranks([30], [35], cp_size=2, strategy=strategy)
    ...     for strategy in ("contiguous", "zigzag")
    ... )
    >>> plans = [plan_relayout(*pair) for pair in zip(states, attention)]
    >>> lint(from_relayouts(plans, states, attention, [30], [5])).proved
    True
    """
    document = from_metadata(target, extend_lens, prefix_lens)
    requests = document["requests"]
    extend, prefix = (ints([one[name] for one in requests]) for name in ("extend", "prefix"))
    base = offsets(extend)
    sent = [
        parts_sent(ints(one.local_q_indices), plan) for one, plan in zip(source, plans, strict=True)
    ]
    for rank, plan in enumerate(plans):
        arrived = np.concatenate([parts[rank] for parts in sent])
        places = ints(plan.recv_indices)
        rows = np.full(len(ints(target[rank].local_q_indices)), -1)
        both = min(len(arrived), len(places))  # other rows show as a difference of the counts
        rows[places[:both]] = arrived[:both]
        request = np.searchsorted(base, rows, side="right") - 1  # -1 for a missing row
        position = np.where(request < 0, 0, rows - base[request] + prefix[request])
        document["ranks"][rank]["rows"] = row_runs(request, position)
        counts = {"sends": plan.send_counts, "receives": plan.recv_counts}
        document["ranks"][rank]["collectives"] = [{"kind": "all_to_all", **counts}]
    return document
