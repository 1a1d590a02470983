# SPDX-License-Identifier: Apache-2.0
"""Random plans of the library, all right: whatever the linter finds in one is a false alarm.
`make false-alarms-plans` lints them, ``--only 12345 --seed 7`` one of them again."""

import random
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import cpattn
from cpattn.captures.told import TOLD, written
from cpattn.context_parallel.halo import plan_halo, plan_relayout
from cpattn.context_parallel.vllm_0_32 import build_pcp_layout
from cpattn.distributed.plans.plan import make_plan
from cpattn.distributed.plans.sharded_plan import make_decode_plan, shard_plan
from cpattn.kv import PageInterleave, TokenInterleave, plan_units
from cpattn.profiling.calls import Call
from cpattn_proof import NotUsable, lint
from cpattn_proof.captures import Capture, RecordedCall
from cpattn_proof.linting.adapters.captures import from_capture
from cpattn_proof.linting.adapters.context_parallel import from_metadata, from_plans
from cpattn_proof.linting.adapters.decode import from_local_lens
from cpattn_proof.linting.adapters.pcp import from_segments
from cpattn_proof.linting.adapters.relayouts import from_relayouts
from cpattn_proof.linting.adapters.selections import from_topk
from cpattn_proof.linting.adapters.shards import from_sharded_plans
from cpattn_proof.linting.adapters.units import from_halos, from_unit_writes
from support.proof.alarms import count_alarms

STRATEGIES = ("zigzag", "contiguous", "interleave")
Chance = random.Random
Lens = list[int]


def _batch(chance: Chance) -> tuple[Lens, Lens]:
    """Return new and cached tokens: short and long sequences, some of them empty, but not all."""
    most, count = chance.choice((3, 30, 120)), chance.randint(1, 5)
    extend = [chance.randint(0, most) for _ in range(count)]
    extend[chance.randrange(count)] += 1
    return extend, [chance.choice((0, chance.randint(0, most))) for _ in extend]


def _metadata(chance: Chance, extend: Lens, prefix: Lens, page_size: int) -> Any:
    """Return cuts by each strategy, by weights, and at pages."""
    lens = [new + cached for new, cached in zip(extend, prefix, strict=True)]
    size, strategy = chance.randint(1, 6), chance.choice(STRATEGIES)
    options: dict[str, Any] = {}
    if strategy != "interleave" and chance.random() < 0.5:
        options["weights"] = [chance.choice((1, 2.5, chance.uniform(0.1, 9))) for _ in range(size)]
    if strategy != "interleave" and chance.random() < 0.3:
        pairs = zip(lens, prefix, extend, strict=True)
        pages = [-(-length // page_size) - old // page_size for length, old, new in pairs if new]
        size = min(size, sum(pages))
        options = {"page_size": page_size, "weights": options.get("weights", [1] * size)[:size]}
    if chance.random() < 0.2 and "page_size" not in options:
        options["num_tokens"] = sum(extend) + chance.randint(0, 9)
    return cpattn.build_cp_metadata_all_ranks(
        extend, lens, cp_size=size, strategy=strategy, **options
    )


def _seen(chance: Chance, padding: int = 0) -> dict[str, Any]:
    """Return a causal mask, or perhaps none without padding, and a window with one or two sides."""
    sides = [chance.choice((None, chance.randint(0, 12))) for _ in range(2)]
    causal = padding > 0 or chance.random() < 0.7
    return {"causal": causal, "window": chance.choice((None, sides[0], tuple(sides)))}


def _tables(chance: Chance, lens: Lens, page_size: int) -> tuple[list[Lens], int]:
    counts = [-(-length // page_size) for length in lens]
    pages = chance.sample(range(sum(counts) + 3), sum(counts))
    rows = [[pages.pop() for _ in range(count)] for count in counts]
    return [row + [-1] * (max(counts) - len(row)) for row in rows], sum(counts) + 3


def _plans(chance: Chance, page_size: int) -> tuple[list[Any], int]:
    extend, prefix = _batch(chance)
    metadata = _metadata(chance, extend, prefix, page_size)
    lens = [new + cached for new, cached in zip(extend, prefix, strict=True)]
    lens[-1] += chance.choice((0, metadata[0].total_seq_lens - sum(extend)))  # with padding
    tables, num_pages = _tables(chance, lens, page_size)
    given: dict[str, Any] = {"block_tables": tables, "out_cache_loc": None, "page_size": page_size}
    return [make_plan(one, extend, pad_to_physical=False, **given) for one in metadata], num_pages


def _placement(chance: Chance, size: int, page_size: int) -> Any:
    if chance.random() < 0.5:
        return PageInterleave(shard_size=size, page_size=page_size)
    return TokenInterleave(shard_size=size, interleave=chance.choice((1, 2, 3, page_size)))


def _of_cuts(chance: Chance) -> Any:
    extend, prefix = _batch(chance)
    plans = _metadata(chance, extend, prefix, chance.choice((1, 4, 16)))
    return from_metadata(plans, extend, prefix, **_seen(chance))


def _of_objects(chance: Chance) -> Any:
    """Return cuts as objects of an engine with plain lists."""
    extend, prefix = _batch(chance)
    plans = _metadata(chance, extend, prefix, 4)
    objects = [SimpleNamespace(**plan.to_dict()) for plan in plans]
    return from_metadata(objects, extend, prefix, **_seen(chance))


def _of_plans(chance: Chance) -> Any:
    plans, num_pages = _plans(chance, chance.choice((1, 4, 16)))
    return from_plans(plans, num_pages, **_seen(chance, plans[0].num_padding_tokens))


def _shared(chance: Chance) -> tuple[list[Any], int]:
    page_size = chance.choice((1, 4, 16))
    plans, num_pages = _plans(chance, page_size)
    placement = _placement(chance, len(plans), page_size)
    options: dict[str, Any] = {"exchange": "auto", "max_scratch_bytes": 1 << 20}
    return [shard_plan(plan, placement=placement, **options) for plan in plans], num_pages


def _of_captures(chance: Chance) -> Any:
    """Return plans as ranks record them."""
    plans, _ = chance.choice((_shared(chance), _plans(chance, 4)))
    calls = []
    for rank, plan in enumerate(plans):
        lens = plan.tokens.q_lens, plan.tokens.pages.kv_lens
        cp = SimpleNamespace(placement=getattr(plan, "placement", None))
        call = Call("ContextParallel.plan", 0, 0, (cp, *lens), {}, plan)
        calls.append(RecordedCall(call.name, rank, 0, 0, written(TOLD[call.name](call) or {})))
    headers = tuple({"rank": rank} for rank in range(len(plans)))
    return from_capture(Capture(headers, tuple(calls)))[0]


def _of_shards(chance: Chance) -> Any:
    plans, num_pages = _shared(chance)
    return from_sharded_plans(plans, num_pages, **_seen(chance, plans[0].num_padding_tokens))


def _of_decodes(chance: Chance) -> Any:
    page_size, size = chance.choice((1, 4, 16)), chance.randint(1, 6)
    new = [chance.choice((1, chance.randint(1, 4))) for _ in range(chance.randint(1, 5))]
    lens = [count + chance.choice((0, chance.randint(0, 90))) for count in new]
    tables, num_pages = _tables(chance, lens, page_size)
    given: dict[str, Any] = {"q_lens": new, "block_tables": tables, "page_size": page_size}
    given |= {"placement": _placement(chance, size, page_size)}
    given |= {"custom_mask": None, "packed_custom_mask": None}
    plans = [make_decode_plan(lens, cp_rank=rank, **given) for rank in range(size)]
    return from_sharded_plans(plans, num_pages, **_seen(chance))


def _layout(chance: Chance) -> tuple[Lens, Lens, Any]:
    """Return segments of vLLM's PCP, also with DCP; decodes are shared out or on all ranks."""
    extend, prefix = _batch(chance)
    size = chance.randint(1, 5)
    options: dict[str, Any] = {"pcp_size": size, "dcp_size": chance.choice((1, 2, size))}
    options["shard_decode"] = options["dcp_size"] == 1 and chance.random() < 0.5
    if chance.random() < 0.5:
        options["is_prefill"] = [chance.random() < 0.6 for _ in extend]
    layout = build_pcp_layout(extend, prefix, **options)
    if chance.random() < 0.5:
        most = max(layout.per_rank_num_tokens) + chance.randint(0, 5)
        layout = build_pcp_layout(extend, prefix, padded_num_tokens=most, **options)
    return extend, prefix, layout


def _of_layouts(chance: Chance) -> Any:
    extend, prefix, layout = _layout(chance)
    slots = np.where(layout.gathered_kv_write_mask, layout.padded_gather_idx + 7, -1)
    return from_segments(
        layout.segments, extend, prefix, seq_lens=layout.seq_lens,
        replicated=chance.choice((None, layout.replicated)),
        hidden_restore_idx=layout.hidden_restore_idx, gathered_slots=slots,
        padded_gather_idx=layout.padded_gather_idx,
        window=chance.choice((None, chance.randint(0, 12))),
    )  # fmt: skip


def _of_local_lens(chance: Chance) -> Any:
    """Return lengths of decode context parallelism, with one or several new tokens per request."""
    size, interleave = chance.randint(1, 6), chance.choice((1, 2, 4, 16))
    block_size = interleave * chance.randint(1, 3)
    new = np.array([chance.choice((1, chance.randint(1, 4))) for _ in range(chance.randint(1, 5))])
    lens = new + [chance.randint(0, 200) for _ in new]
    placement = TokenInterleave(shard_size=size, interleave=interleave)
    tables, num_blocks = _tables(chance, (-(-lens // size) + interleave).tolist(), block_size)
    ends = np.concatenate([np.arange(end - n, end) + 1 for n, end in zip(new, lens, strict=True)])
    local, rows = ([placement.local_lens(x, r) for r in range(size)] for x in (lens, ends))
    return from_local_lens(
        lens.tolist(), local, [tables] * size, block_size=block_size, interleave=interleave,
        query_lens=new.tolist(), row_lens=rows, num_blocks=num_blocks,
    )  # fmt: skip


def _of_halos(chance: Chance) -> Any:
    ratio = chance.randint(1, 6)
    rule = {"ratio": ratio, "window": ratio + chance.randint(0, 9)}
    if chance.random() < 0.4:
        extend, prefix, plans = _layout(chance)
        halos = [plan_halo(plans, rank=rank, **rule) for rank in range(len(plans.segments))]
    else:
        extend, prefix = _batch(chance)
        plans = _metadata(chance, extend, prefix, 4)
        halos = [plan_halo(plan, **rule) for plan in plans]
    return from_halos(plans, halos, extend, prefix, **rule)


def _of_units(chance: Chance) -> Any:
    """Return writes of compressed units into the slots of all ranks or of the owners."""
    ratio, page_size = chance.randint(1, 5), chance.choice((1, 2, 4))
    if chance.random() < 0.4:
        extend, prefix, layout = _layout(chance)
        ranks = [{"metadata": layout, "rank": rank} for rank in range(len(layout.segments))]
    else:
        extend, prefix = _batch(chance)
        ranks = [{"metadata": plan} for plan in _metadata(chance, extend, prefix, 4)]
        extend[-1] += ranks[0]["metadata"].total_seq_lens - sum(extend)  # padding has units, too
    placement = chance.choice((None, _placement(chance, len(ranks), page_size)))
    lens = [-(-(new + old) // ratio) + 3 for new, old in zip(extend, prefix, strict=True)]
    tables, num_pages = _tables(chance, lens, page_size)
    given: dict[str, Any] = {"ratio": ratio, "page_size": page_size, "placement": placement}
    halos = [plan_halo(**one, window=2 * ratio, ratio=ratio) for one in ranks]
    plans = [plan_units(**one, block_tables=tables, **given) for one in ranks]
    given |= {"block_tables": [tables] * len(ranks), "num_pages": num_pages}
    return from_unit_writes(halos, plans, extend, prefix, **given)


def _of_relayouts(chance: Chance) -> Any:
    extend, prefix = _batch(chance)
    source = _metadata(chance, extend, prefix, 4)
    lens = [new + cached for new, cached in zip(extend, prefix, strict=True)]
    total = source[0].total_seq_lens
    target = cpattn.build_cp_metadata_all_ranks(
        extend, lens, cp_size=len(source), strategy=chance.choice(STRATEGIES),
        num_tokens=None if total == sum(extend) else total,
    )  # fmt: skip
    plans = [plan_relayout(*pair) for pair in zip(source, target, strict=True)]
    return from_relayouts(plans, source, target, extend, prefix)


def _of_blocks(chance: Chance) -> Any:
    """Return selected blocks from one rank's keys or merged over ranks, with ties."""
    block, topk, size = chance.choice((2, 4)), chance.randint(1, 5), chance.randint(1, 3)
    lens = [chance.randint(1, 60) for _ in range(chance.randint(1, 4))]
    draw = torch.Generator().manual_seed(chance.randrange(1 << 30))
    score = torch.randn(len(lens), max(lens), generator=draw).mul(2).round().div(2)
    options: dict[str, Any] = {"lengths": lens, "block_size": block}
    options |= {"local_blocks": chance.randint(1, 2), "init_blocks": chance.randint(0, 2)}
    topk = max(topk, options["local_blocks"] + options["init_blocks"])
    owner = torch.arange(max(lens)) // block % size
    parts = [
        cpattn.sparse.select_blocks(
            score[:, owner == rank], topk=topk, dcp_rank=rank, dcp_size=size, **options
        )
        for rank in range(size)
    ]
    gathered = [torch.cat(columns, dim=1) for columns in zip(*parts, strict=True)]
    blocks = cpattn.sparse.merge_blocks(*gathered, topk).blocks
    count = max(-(-max(lens) // block), topk)
    every = cpattn.sparse.select_blocks(score, topk=count, **options).block_scores
    every[every == torch.inf] = 99.0  # blocks that are always selected
    local = [
        cpattn.sparse.dcp_local_indices(blocks, dcp_rank=rank, dcp_size=size)
        for rank in range(size)
    ]
    last = [-(-length // block) - 1 for length in lens]  # the query's own block
    rows = [(range(len(lens)), last)] * size
    return from_topk(
        [1] * len(lens), last, [([*r], p) for r, p in rows], local, topk=topk,
        scores=[every] * size, shards=size,
    )  # fmt: skip


#: Functions that draw right plans, by name, and the invariants that most such plans decide.
KINDS: dict[str, tuple[Callable[[Chance], Any], set[str]]] = {
    "cuts": (_of_cuts, {"OWN", "COV", "LEN"}),
    "objects": (_of_objects, {"OWN"}),
    "captures": (_of_captures, {"OWN", "LEN", "PAD"}),
    "plans": (_of_plans, {"OWN", "COV", "LEN", "ADDR", "PAD"}),
    "shards": (_of_shards, {"OWN", "COV", "LEN", "ADDR", "PAD"}),
    "decodes": (_of_decodes, {"OWN", "COV", "LEN", "ADDR", "PAD"}),
    "PCP layouts": (_of_layouts, {"OWN", "COV", "LEN"}),
    "local lengths": (_of_local_lens, {"OWN", "COV", "LEN"}),
    "halos": (_of_halos, {"OWN", "COV"}),
    "units": (_of_units, {"OWN", "LEN", "ADDR"}),
    "relayouts": (_of_relayouts, {"OWN", "COV", "LEN", "SEQ"}),
    "blocks": (_of_blocks, {"TOPK"}),
}


def alarm_of(seed: int, number: int) -> str | None:
    """Return findings in a plan, or that it is not judged; else None."""
    chance = random.Random(f"{seed} {number}")
    name, (draw, decided) = list(KINDS.items())[number % len(KINDS)]
    try:
        report = lint(draw(chance), name=name)
    except NotUsable as error:
        return f"{name}: cannot be judged: {error}"
    if report.findings:
        return report.text()
    missing = decided - set(report.checked)
    return f"{name}: {', '.join(sorted(missing))} not checked" if missing else None


if __name__ == "__main__":
    sys.exit(count_alarms(__doc__, "plans", alarm_of))
