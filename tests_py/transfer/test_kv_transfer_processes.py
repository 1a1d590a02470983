# SPDX-License-Identifier: Apache-2.0
"""KV from a prefill to a decode process, byte for byte, whatever the two servers look like.

Every case runs twice: over the engine within this process, and between two processes over
Mooncake. The decode side knows by itself what each of its pages must hold in the end, the
canaries in all the others included.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

import cpattn
from support.transfer.engines import MOONCAKE
from support.transfer.transfer_cases import Case, Model, Server
from support.transfer.transfer_processes import Peer
from support.transfer.transfer_sides import DecodeSide, finish, prepare, send, send_prompt

pytestmark = pytest.mark.slow


MHA = Model(layer_ids=(0, 1, 2, 3), num_kv_heads=2)
WIDE_V = replace(MHA, head_dim=12, v_head_dim=4, dtype="float32")
GQA = replace(MHA, num_kv_heads=4)
MLA = Model(layer_ids=(0, 1, 2, 3), head_dim=32, v_head_dim=8)
DSA = replace(MLA, index_head_dim=16)
FP8 = replace(DSA, dtype="float8_e4m3fn")
INT8 = replace(GQA, dtype="int8", scale_dtype="float16")
E5M2 = replace(GQA, dtype="float8_e5m2", v_head_dim=4, scale_dtype="float32")
HYBRID = replace(MHA, layer_ids=(3, 7, 11, 15, 19))
FIFTEEN = replace(MHA, layer_ids=tuple(range(15)))
ONE, TWO, UNEVEN = Server((4,)), Server((2, 2)), Server((3, 1))


def split(server: Server) -> str:
    return "+".join(map(str, server.stages))


def cases() -> Iterator[Case]:
    for name, model in (("mha", MHA), ("wide-v", WIDE_V), ("mla", MLA), ("dsa", DSA), ("fp8", FP8)):
        for stages in (ONE, TWO, UNEVEN):
            yield Case(f"{name}-pp-{split(stages)}-to-1", model, stages, ONE, num_tokens=75)
    for name, model in (("mha", MHA), ("mla", MLA), ("dsa", DSA)):
        for stages in (ONE, TWO, UNEVEN):
            for drafts in ((0, 2), (2, 0), (1, 1), (2, 2)):
                prefill = replace(stages, draft_layers=drafts[0])
                decode = replace(ONE, draft_layers=drafts[1])
                label = f"scenario_54_{name}-pp-{split(stages)}-drafts-{drafts[0]}-{drafts[1]}"
                yield Case(label, model, prefill, decode, num_tokens=40)
    for page_size in (16, 128):
        for fia in ((False, False), (True, True), (False, True), (True, False)):
            prefill = replace(UNEVEN, page_size=page_size, use_fia=fia[0])
            decode = replace(ONE, page_size=page_size, use_fia=fia[1])
            label = f"scenario_57_fia-{fia[0]}-{fia[1]}-page-{page_size}"
            yield Case(label, MHA, prefill, decode, num_tokens=3 * page_size + 7)
    for model, page_sizes in ((MHA, (64, 16)), (DSA, (64, 16)), (MHA, (16, 64)), (MLA, (16, 128))):
        prefill = replace(TWO, page_size=page_sizes[0])
        decode = replace(ONE, page_size=page_sizes[1])
        label = f"scenario_59_page-{page_sizes[0]}-to-{page_sizes[1]}-head-dim-{model.head_dim}"
        yield Case(label, model, prefill, decode, num_tokens=201)
    for p, q in ((1, 2), (2, 1), (4, 1), (1, 4), (2, 4), (8, 2), (2, 8), (8, 8), (8, 16)):
        prefill, decode = replace(TWO, tp_size=p), replace(ONE, tp_size=q)
        yield Case(f"scenario_56_gqa-tp-{p}-to-{q}", GQA, prefill, decode, num_tokens=37)
        yield Case(f"int8-scales-tp-{p}-to-{q}", INT8, prefill, decode, num_tokens=37)
    for name, model in (("int8", INT8), ("e5m2", E5M2)):
        fia = replace(UNEVEN, use_fia=True, draft_layers=1)
        yield Case(f"{name}-scales-fia", model, fia, replace(ONE, draft_layers=1), num_tokens=75)
        pages = replace(TWO, page_size=64)
        yield Case(f"{name}-scales-page-64-to-16", model, pages, ONE, 201, prefix=5)
        spread = replace(ONE, dcp_size=2, dcp_interleave=4)
        yield Case(f"{name}-scales-dcp", model, TWO, spread, 75, chunks=(32, 50))
    yield Case("mla-tp-4-to-2", MLA, replace(TWO, tp_size=4), replace(ONE, tp_size=2), 37)
    tp_2 = replace(TWO, tp_size=2)
    yield Case("scenario_55_tp-1-pp-3-to-tp-2-pp-2", MHA, Server((2, 1, 1)), tp_2, num_tokens=50)
    yield Case("pp-3-to-pp-2", DSA, Server((1, 1, 2)), TWO, num_tokens=50)
    yield Case("scenario_53_pp-7+8-to-1", FIFTEEN, Server((7, 8)), Server((15,)), num_tokens=33)
    yield Case("pp-7+8-to-1-draft", FIFTEEN, Server((7, 8)), Server((15,), draft_layers=1), 33)
    yield Case("hybrid-pp-3+2-to-1", HYBRID, Server((3, 2)), Server((5,)), num_tokens=33)
    yield Case("hybrid-pp-1-to-2+3", HYBRID, Server((5,)), Server((2, 3)), num_tokens=33)
    for prefix in (16, 48, 5, 69):
        yield Case(f"scenario_60_prefix-{prefix}", DSA, UNEVEN, ONE, num_tokens=70, prefix=prefix)
    for chunks in ((16, 32), (20, 40, 60), (1, 2, 75), (75,)):
        yield Case(f"chunks-{'-'.join(map(str, chunks))}", DSA, TWO, ONE, 75, chunks=chunks)
    yield Case("chunks-prefix", MHA, UNEVEN, ONE, num_tokens=90, prefix=32, chunks=(40, 65))
    for share in ("pages", "layers"):
        for cp_size in (2, 3, 8):
            label = f"scenario_61_cp-{cp_size}-{share}"
            yield Case(label, DSA, TWO, ONE, 75, cp_size=cp_size, cp_share=share)
    for interleave in (1, 4, 16):
        decode = replace(ONE, dcp_size=2, dcp_interleave=interleave)
        label = f"scenario_58_dcp-interleave-{interleave}"
        yield Case(label, MLA, TWO, decode, num_tokens=75)
        yield Case(f"{label}-chunks", MLA, TWO, decode, num_tokens=75, chunks=(32, 50))
    tokens = Server((4,), page_size=1, num_pages=700)
    yield Case("several-batches", MHA, tokens, tokens, num_tokens=600)
    for tokens in (1, 15, 16, 17):
        yield Case(f"tokens-{tokens}", MHA, TWO, ONE, num_tokens=tokens)


def engine_cases() -> Iterator[Case]:
    """Servers whose buffers the functions of engines match by position; compat: as released."""
    for name, model in (("mha", MHA), ("wide-v", WIDE_V), ("mla", MLA), ("dsa", DSA)):
        for stages in (ONE, TWO, UNEVEN):
            for drafts in ((0, 0), (0, 2), (2, 2)):
                if model.num_kv_heads and drafts[0] and stages != ONE:
                    continue  # refused: lists of K and V do not tell which of them are drafts
                prefill = replace(stages, draft_layers=drafts[0])
                decode = replace(ONE, draft_layers=drafts[1])
                label = f"lists-{name}-pp-{split(stages)}-drafts-{drafts[0]}-{drafts[1]}"
                yield Case(label, model, prefill, decode, 50, planner="lists")
    for p, q in ((1, 2), (2, 1), (4, 1), (1, 4), (8, 2), (2, 8), (8, 8)):
        prefill, decode = replace(TWO, tp_size=p), replace(ONE, tp_size=q)
        yield Case(f"lists-gqa-tp-{p}-to-{q}", GQA, prefill, decode, 37, planner="lists")
    for model in (MLA, DSA):
        for stages in (ONE, TWO, UNEVEN):
            label = f"compat-{len(model.kinds)}-kinds-pp-{split(stages)}"
            prefill, decode = replace(stages, draft_layers=1), replace(ONE, draft_layers=1)
            yield Case(label, model, prefill, decode, 50, chunks=(20, 40), planner="compat")
    yield Case("compat-mha-pp-2+2", MHA, TWO, ONE, 90, 32, (40, 65), planner="compat")


def random_case(seed: int) -> Case:
    """Any servers that fit together."""
    draw = random.Random(seed)
    layers = tuple(sorted(draw.sample(range(draw.choice([6, 40])), draw.randint(1, 6))))
    model = replace(draw.choice([MHA, WIDE_V, GQA, MLA, DSA, FP8, INT8, E5M2]), layer_ids=layers)
    page_sizes = draw.choices([1, 8, 16, 64], k=2)
    drafts = draw.choice([(0, 0), (0, 2), (1, 0), (2, 2)])
    tp_sizes = draw.choice([(1, 1), (1, 1), (2, 1), (1, 2), (4, 2), (2, 8)])
    num_tokens = draw.randint(1, 150)
    prefix = draw.randrange(num_tokens)
    cp_size, cp_share = draw.choice([1, 2, 3]), draw.choice(["pages", "layers"])
    if cp_share == "pages":  # whole ones, so both servers have the same
        page_sizes, tp_sizes = page_sizes[:1] * 2, tp_sizes[:1] * 2
        prefix -= prefix % page_sizes[0]
    prefill, decode = (
        Server(
            stages=random_stages(draw, len(layers)),
            tp_size=tp_size,
            page_size=page_size,
            use_fia=draw.random() < 0.5,
            draft_layers=draft_layers,
            num_pages=160 // page_size + 8,
        )
        for tp_size, page_size, draft_layers in zip(tp_sizes, page_sizes, drafts, strict=True)
    )
    if cp_share == "layers":
        dcp_size, interleave = draw.choice([1, 1, 2, 3]), draw.choice([1, page_sizes[1]])
        decode = replace(decode, dcp_size=dcp_size, dcp_interleave=interleave)
    chunks = tuple(sorted(draw.sample(range(1, 150), draw.randint(0, 3))))
    return Case(
        f"random-{seed}", model, prefill, decode, num_tokens, prefix, chunks, cp_size, cp_share
    )


def random_stages(draw: random.Random, num_layers: int) -> tuple[int, ...]:
    ends = sorted(draw.sample(range(1, num_layers), draw.randint(0, min(2, num_layers - 1))))
    return tuple(end - begin for begin, end in pairwise([0, *ends, num_layers]))


CASES = [replace(case, seed=seed) for seed, case in enumerate([*cases(), *engine_cases()])]
RANDOM = [replace(random_case(seed), seed=seed) for seed in range(60)]


@pytest.mark.parametrize("case", CASES + RANDOM, ids=lambda case: case.name)
def test_within_a_process(case):
    with cpattn.transfer.LocalEngine() as engine:
        decode = DecodeSide(engine)
        send_prompt(engine, case, engine.session_id, decode.prepare(case))
        assert decode.finish() == []


@pytest.fixture(scope="module")
def peers(request) -> Iterator[tuple[Peer, Peer]]:
    """A prefill and a decode process with an engine, which serve all its cases."""
    request.param.require()
    make = request.param.make
    with Peer(make_engine=make) as decode, Peer(network_of=decode, make_engine=make) as prefill:
        yield prefill, decode


PAIRS = [(MOONCAKE, case) for case in CASES + RANDOM]


@pytest.mark.parametrize(("peers", "case"), PAIRS, indirect=["peers"], ids=lambda x: x.name)
def test_between_processes(peers, case):
    prefill, decode = peers
    described = decode.call(prepare, case)
    try:
        prefill.call(send, case, decode.session_id, described)
    finally:
        wrong = decode.call(finish)  # and makes room for the next case
    assert wrong == []
