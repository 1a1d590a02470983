# SPDX-License-Identifier: Apache-2.0
"""Good calls of what shares KV pools and sequences over ranks."""

from __future__ import annotations

from collections.abc import Callable

from cpattn import kv, transfer
from support.api.api_call_kinds import Good
from support.api.transfer_calls import method, of


def pages() -> kv.PageInterleave:
    return kv.PageInterleave(shard_size=2, page_size=4)


def tokens() -> kv.TokenInterleave:
    return kv.TokenInterleave(shard_size=2, interleave=4)


def allocator() -> kv.StripedAllocator:
    """With pages 2, 3 and 4 in use."""
    made = kv.StripedAllocator(16, page_size=4, shard_size=2)
    made.alloc_cyclic(0, 12)
    return made


def gather() -> kv.ShardGatherPlan:
    return kv.plan_shard_gather(
        [list(range(8, 20))], None, [8], [10], placement=pages(), size=16, max_prefix_tokens=16,
        chunk_tokens=8,
    )  # fmt: skip


SHARDED: dict[str, Callable[[], Good]] = {
    "PageInterleave": of(kv.PageInterleave, shard_size=("int", 2), page_size=("int", 4)),
    "PageInterleave.owner_of": method(pages, "owner_of", slots=("ints", [8, 12, -1])),
    "PageInterleave.local_index": method(pages, "local_index", slots=("ints", [8, 12, -1])),
    "PageInterleave.filter_local": method(
        pages, "filter_local", slots=("ints", [8, 12, -1]), rank=("int", 1)
    ),
    "PageInterleave.global_index": method(
        pages, "global_index", rank=("int", 1), local=("ints", [4, 5, -1])
    ),
    "PageInterleave.num_local_slots": method(pages, "num_local_slots", num_slots=("int", 9)),
    "TokenInterleave": of(kv.TokenInterleave, shard_size=("int", 2), interleave=("int", 4)),
    "TokenInterleave.owner_of": method(tokens, "owner_of", positions=("ints", [8, 12, -1])),
    "TokenInterleave.local_index": method(tokens, "local_index", positions=("ints", [8, 12, -1])),
    "TokenInterleave.filter_local": method(
        tokens, "filter_local", positions=("ints", [8, 12, -1]), rank=("int", 1)
    ),
    "TokenInterleave.global_index": method(
        tokens, "global_index", rank=("int", 1), local=("ints", [4, 5, -1])
    ),
    "TokenInterleave.local_lens": method(
        tokens, "local_lens", seq_lens=("ints", [9, 0]), rank=("int", 1)
    ),
    "StripedAllocator": of(
        kv.StripedAllocator,
        size=("int", 16), page_size=("int", 4), shard_size=("int", 2), need_sort=("flag", False),
    ),
    "StripedAllocator.alloc_extend": method(
        allocator, "alloc_extend", prefix_lens=("ints", [0, 8]), seq_lens=("ints", [3, 9]),
        rotation_bases=("value", [None, 1]),
    ),
    "StripedAllocator.alloc_cyclic": method(
        allocator, "alloc_cyclic", start_class=("int", 1), num_slots=("int", 5)
    ),
    "StripedAllocator.free": method(allocator, "free", slots=("ints", [8, 12])),
    "ShardGatherPlan.translate": method(gather, "translate", slots=("ints", [8, 12, -1])),
    "ShardGatherPlan.write_plan": method(
        gather, "write_plan", slots=("ints", [8, 12, -1]), rank=("int", 1)
    ),
    "plan_shard_gather": lambda: Good(
        kv.plan_shard_gather,
        {
            "req_to_token": ("table", [list(range(8, 20))]),
            "req_pool_indices": ("?ints", [0]),
            "prefix_lens": ("ints", [8]),
            "seq_lens": ("ints", [10]),
            "placement": ("value", pages()),
            "size": ("int", 16),
            "max_prefix_tokens": ("int", 16),
            "chunk_tokens": ("int", 8),
        },
    ),
}  # fmt: skip


def shard_share() -> Good:
    arguments = {
        "kv_indices": ("ints", [8, 9, 11]),
        "index_slice": ("value", slice(2, 5)),
        "shard_rank": ("int", 1),
        "shard_size": ("int", 2),
    }
    return Good(transfer.filter_kv_indices_for_shard_rank, arguments, names=("pages",))


def cp_share() -> Good:
    arguments = {
        "kv_mgr": ("value", transfer.KVSender(1, 2)),
        "kv_indices": ("ints", [8, 9, 11]),
        "index_slice": ("value", slice(2, 5)),
        "total_pages": ("?int", 5),
    }
    return Good(transfer.filter_kv_indices_for_cp_rank, arguments, names=("pages", "attn_cp_rank"))
