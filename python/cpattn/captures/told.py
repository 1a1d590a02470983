# SPDX-License-Identifier: Apache-2.0
"""Fields that a capture keeps of each call.

The fields are lengths, tables and sizes, copied because engines refill the same buffers for the
next step; tokens and elements of tensors are left out. Plans are values and need no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _core
from .._arguments import key_window
from ..profiling.calls import Call

Fields = dict[str, Any]

# Arguments besides causal and window that decide visible keys; a capture does not keep them.
_MASKS = ("custom_mask", "packed_custom_mask", "first_positions")


def digest(*arrays: NDArray[Any]) -> str:
    """Return a digest of arrays in 16 characters."""
    hashed = blake2b(digest_size=8)
    for array in arrays:
        hashed.update(np.ascontiguousarray(array).tobytes())
    return hashed.hexdigest()


def plan_digest(plan: Any) -> str:
    """Return a digest of the work division of an `AttentionPlan`."""
    return digest(plan.items, plan.page_indptr, plan.page_ids)


def metadata_digest(plan: Any) -> str:
    """Return a digest of a rank's tokens, in order, in a `ContextParallelMetadata`."""
    return digest(np.asarray(plan.local_q_indices, np.int64))


def _ints(value: Any) -> NDArray[np.int64] | None:
    if value is None:
        return None
    if hasattr(value, "detach"):
        value = value.detach().numpy()
    return np.array(value, np.int64)


def _attention_plan(call: Call) -> Fields:
    given, plan = call.kwargs, call.result
    q_lens = _core.ints(given["q_lens"], "plan_attention", "q_lens")
    flags = _core.flags(given.get("causal", True), len(q_lens), "plan_attention", "causal")
    causal = all(flags)
    masked = causal != any(flags) and len(flags) > 0  # some sequences are causal, as with a mask
    masked |= any(given.get(name) is not None for name in _MASKS)
    return {
        "plan": plan,
        "q_lens": np.array(q_lens, np.int64),
        "kv_lens": _ints(given["kv_lens"]),
        "causal": causal,
        "window": key_window(given.get("window"), causal, "plan_attention", "window"),
        "masked": masked,
        "batch_invariant": bool(given.get("batch_invariant", False)),
        "allow_short_kv": bool(given.get("allow_short_kv", False)),
    }


def _attention_run(call: Call) -> Fields:
    plan, q = call.args[0] if call.args else call.kwargs["plan"], call.result
    q = q[0] if isinstance(q, tuple) else q
    return {"plan": plan, "shape": q.shape, "dtype": q.dtype}


def _metadata(call: Call) -> Fields:
    given = dict(zip(("extend_lens", "seq_lens"), call.args, strict=False)) | dict(call.kwargs)
    plans = call.result if isinstance(call.result, list) else [call.result]
    return {
        "extend_lens": _ints(given.get("extend_lens")),
        "seq_lens": _ints(given.get("seq_lens")),
        "num_tokens": given.get("num_tokens"),
        "kv_len_convention": given.get("kv_len_convention", "baked"),
        "compat": bool(given.get("compat", False)),
        "metadata": plans,
    }


def _batch(call: Call) -> Fields:
    cp, plan = call.args[0], call.result
    given = dict(zip(("extend_lens", "seq_lens"), call.args[1:], strict=False)) | dict(call.kwargs)
    return {
        "page_size": plan.page_size,
        "placement": None if cp.placement is None else repr(cp.placement),
        "extend_lens": _ints(given["extend_lens"]),
        "seq_lens": _ints(given.get("seq_lens")),
        "block_tables": plan.block_tables,
        "slots": plan.slots,
        "rows_per_rank": list(plan.rows_per_rank),
        "metadata": [plan.metadata],
        "sharded": None if cp.placement is None else plan,
    }


def _decode_batch(call: Call) -> Fields:
    plan = call.result
    tokens = plan.batch.tokens
    return {
        "cp_rank": plan.cp_rank,
        "cp_size": plan.placement.shard_size,
        "page_size": plan.page_size,
        "placement": repr(plan.placement),
        "extend_lens": tokens.q_lens,
        "seq_lens": tokens.pages.kv_lens,
        "block_tables": tokens.pages.tables(0),
        "slots": plan.slots,
        "sharded": plan,
    }


def _rank_call(call: Call) -> Fields:
    cp = call.args[0]
    return {"cp_rank": cp.cp_rank, "cp_size": cp.cp_size}


def _post(call: Call) -> Fields:
    exchange, name, sends, receives = call.args
    return {
        "cp_rank": exchange.rank,
        "exchange": name,
        "sends": {str(rank): block.nbytes for rank, block in sends.items()},
        "receives": {str(rank): block.nbytes for rank, block in receives.items()},
    }


def _transfer(call: Call) -> Fields:
    plan = call.result
    return {"src_addrs": plan.src_addrs, "dst_addrs": plan.dst_addrs, "lengths": plan.lengths}


def _pcp_layout(call: Call) -> Fields:
    manager, *lens = call.args
    given = dict(zip(("num_scheduled_tokens", "num_computed_tokens"), lens, strict=False))
    given |= call.kwargs
    segments, _ = call.result
    return {
        "cp_rank": manager.pcp_rank,
        "cp_size": manager.pcp_world_size,
        "extend_lens": _ints(given["num_scheduled_tokens"]),
        "prefix_lens": _ints(given["num_computed_tokens"]),
        "rank_segments": segments,
    }


def _dcp_tables(call: Call) -> Fields:
    tables, sharded = call.args[0], call.kwargs.get("dcp_sharded")
    return {
        "cp_rank": tables.cp_rank,
        "cp_size": tables.cp_size,
        "interleave": tables.cp_interleave,
        "block_sizes": list(tables.block_sizes),
        "dcp_sharded": [True] * len(tables.block_sizes) if sharded is None else list(sharded),
    }


def _dcp_blocks(call: Call) -> Fields | None:
    given = dict(zip(("req_index", "new_block_ids", "overwrite"), call.args[1:], strict=False))
    given |= call.kwargs
    if call.args[0].cp_size == 1:
        return None
    return {
        "request": int(given["req_index"]),
        "block_ids": list(map(list, given["new_block_ids"])),
        "overwrite": bool(given["overwrite"]),
    }


def _dcp_step(call: Call) -> Fields | None:
    runner = call.args[0]
    if runner.dcp_size == 1:
        return None
    batch = call.kwargs.get("input_batch", call.args[-1])
    if runner.pcp_manager is not None:  # then it is the part of this rank
        batch = runner.pcp_manager._global_batch
    import torch
    from vllm.v1.attention.backends.utils import (  # type: ignore[import-not-found]
        get_dcp_local_seq_lens,
    )

    share = runner.dcp_size, runner.dcp_rank, runner.cp_interleave
    lens = batch.num_scheduled_tokens, batch.num_computed_tokens_np
    extend, prefix = (np.array(of_batch, np.int64) for of_batch in lens)
    local = get_dcp_local_seq_lens(torch.from_numpy(extend + prefix), *share)
    return {
        "cp_rank": runner.dcp_rank,
        "cp_size": runner.dcp_size,
        "requests": _ints(batch.idx_mapping_np),
        "extend_lens": extend,
        "prefix_lens": prefix,
        "local_seq_lens": _ints(local),
    }


def _links(call: Call) -> Fields:
    return {
        "links": [
            {"source": link.source, "destination": link.destination}
            | {name: getattr(link.plan, name) for name in ("src_addrs", "dst_addrs", "lengths")}
            for link in call.result
        ]
    }


#: Maps the name of a call to the function that copies its fields on the calling thread, or to None
#: for calls that are not recorded.
TOLD: Mapping[str, Callable[[Call], Fields | None]] = {
    "plan_attention": _attention_plan,
    "run_attention": _attention_run,
    "build_cp_metadata": _metadata,
    "build_cp_metadata_all_ranks": _metadata,
    "ContextParallel.plan": _batch,
    "ContextParallel.plan_decode": _decode_batch,
    **{
        f"ContextParallel.{name}": _rank_call
        for name in ("write_kv", "prefetch", "attend", "attend_sparse", "decode", "decode_sparse")
    },
    "RowExchange.post": _post,
    # vLLM's GPU worker makes these calls; the vLLM plug-in announces them.
    "PCPManager._build_batch_layout": _pcp_layout,
    "BlockTables.__init__": _dcp_tables,
    "BlockTables.append_block_ids": _dcp_blocks,
    "GPUModelRunner.prepare_attn": _dcp_step,
    "plan_kv_transfer": _transfer,
    "plan_kv_links": _links,
}


def written(fields: Fields) -> Fields:
    """Return the fields in written form; the writing thread calls it."""
    fields = dict(fields)
    if (plans := fields.pop("metadata", None)) is not None:
        first = plans[0]
        fields |= {
            "cp_rank": first.cp_rank if len(plans) == 1 else None,
            "cp_size": first.cp_size,
            "strategy": first.strategy,
            "weights": first.weights,
            "cut_pages": first.page_size,
            "digests": [metadata_digest(plan) for plan in plans],
        }
        if len(plans) == 1:
            fields["local_q_indices"] = np.asarray(first.local_q_indices, np.int64)
    if "sharded" in fields:
        plan, held_slots, held_keys = fields.pop("sharded"), None, None
        if plan is not None:
            held_slots = np.where(plan.local_slots >= 0, plan.slots, -1)
            held_keys = int(plan.batch.shares.counts(plan.cp_rank).sum())
        fields |= {"held_slots": held_slots, "held_keys": held_keys}
    if (ranks := fields.pop("rank_segments", None)) is not None:
        rows = [
            (
                rank, one.global_batch_req_idx,
                one.global_batch_slice.start, one.global_batch_slice.stop,
                one.rank_local_batch_slice.start, one.rank_local_batch_slice.stop,
            )
            for rank, segments in enumerate(ranks)
            for one in segments
        ]  # fmt: skip
        fields["segments"] = np.array(rows, np.int64).reshape(-1, 6)
    if isinstance(plan := fields.get("plan"), _core.AttentionPlan):
        del fields["plan"]
        fields |= {
            "page_ids": plan.page_ids,
            "page_indptr": plan.page_indptr,
            "digest": plan_digest(plan),
        }
        fields |= {name: getattr(plan, name) for name in PLAN_SIZES}
    return fields


PLAN_SIZES = ("page_size", "num_pages", "num_heads", "num_kv_heads", "head_dim", "v_head_dim")
