# SPDX-License-Identifier: Apache-2.0
"""Choice of the exchange for a layer of sparse attention: the fewest bytes, if it fits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..layers.choice import ExchangeChoice
from ..plans.sharded_plan import ShardedPlan
from .inputs import SparseInputs


@dataclass(frozen=True)
class SparseSizes:
    """Sizes that decide how much a layer of sparse attention exchanges."""

    topk: int
    query_bytes: int  # of a token, in all heads
    result_bytes: int  # of the same, with the LSE
    asking_bytes: int  # queries and weights of the indexer for a token
    latent_bytes: int  # of a key
    index_key_bytes: int  # of a key of the indexer, with its scale

    @classmethod
    def of_inputs(cls, inputs: SparseInputs) -> SparseSizes:
        """Return the sizes of a layer from the inputs of a rank."""
        q, index_q, weights = inputs.q, inputs.index_q, inputs.weights
        asking = index_q.shape[1] * index_q.shape[2] * index_q.element_size()
        return cls(
            topk=inputs.topk,
            query_bytes=q.shape[1] * q.shape[2] * q.element_size(),
            result_bytes=q.shape[1] * (inputs.d_v * q.element_size() + 4),
            asking_bytes=asking + weights.shape[1] * weights.element_size(),
            latent_bytes=inputs.latents.shape[1],
            index_key_bytes=inputs.index_key_bytes,
        )


def choose_sparse(plan: ShardedPlan, sizes: SparseSizes) -> ExchangeChoice:
    """See ContextParallel.choose_sparse_exchange."""
    received = _received_bytes(plan, sizes)
    name = min(received, key=lambda each: received[each])
    other = next(each for each in received if each != name)
    reason = f"a rank receives at most {received[name]} bytes, by {other} {received[other]}"
    scratch = 2 * sum(plan.kv_counts) * sizes.index_key_bytes
    if name == "gather" and scratch > plan.max_scratch_bytes:
        name = "pass_q"
        reason += f"; index keys take {scratch} bytes, more than max_scratch_bytes"
    return ExchangeChoice(name, reason, received)


def _received_bytes(plan: ShardedPlan, sizes: SparseSizes) -> dict[str, int]:
    """Return the most bytes that a rank receives, if no two of its rows select the same key."""
    counts, rows, topk = np.array(plan.kv_counts), np.array(plan.rows_per_rank), sizes.topk
    visible = plan.batch.visible_keys > topk
    searching = np.array([part.sum() for part in np.split(visible, np.cumsum(rows)[:-1])])
    others, peers = counts.sum() - counts, len(counts) - 1
    pass_q = (
        (searching.sum() - searching) * sizes.asking_bytes
        + peers * searching * 8 * topk
        + (rows.sum() - rows) * (4 * topk + sizes.query_bytes)
        + peers * rows * sizes.result_bytes
    )
    gather = np.minimum(others, rows * topk) * sizes.latent_bytes
    gather += peers * -(-counts.sum() // 8)
    if searching.any():
        gather += others * sizes.index_key_bytes
    return {"gather": int(gather.max()), "pass_q": int(pass_q.max())}
