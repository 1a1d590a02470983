# SPDX-License-Identifier: Apache-2.0
"""plan_kv_links and plan_kv_transfer bring the right bytes between fleets of any shape."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpattn.transfer import KVEntry, KVLayout, plan_kv_links, plan_kv_transfer
from support.examples import examples
from support.pairwise import pairwise
from support.transfer.kv_fleets import Model, Side, check_fleets, servers
from support.transfer.plan_blocks import blocks

MLA = {"k": 8, "v": 2, "index_k": 3}
MHA = {"k": 4, "v": 3}


@st.composite
def models(draw):
    ids = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))
    num_tokens = draw(st.integers(1, 30))
    if draw(st.booleans()):
        return Model(tuple(ids), MHA, draw(st.sampled_from([1, 2, 4])), num_tokens)
    kinds = ["k", "v", "index_k"][: draw(st.integers(1, 3))]
    return Model(tuple(ids), {kind: MLA[kind] for kind in kinds}, 1, num_tokens)


@st.composite
def sides(draw, model, *, is_source):
    page_size = draw(st.sampled_from([1, 2, 4, 6]))
    borders = draw(st.lists(st.integers(1, max(max(model.ids), 1)), max_size=2, unique=True))
    borders = sorted(border for border in borders if border <= max(model.ids))
    dcp_size = 1 if is_source else draw(st.integers(1, 3))
    interleave = draw(st.sampled_from([1, 2, 4, 12])) if dcp_size > 1 else 1
    cycle = page_size if dcp_size == 1 else page_size * dcp_size * interleave
    return Side(
        page_size,
        tuple(borders),
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([0, 2])),
        draw(st.integers(0, model.num_tokens // cycle)) * cycle,
        draw(st.integers(1, 3)) if is_source else 1,
        dcp_size,
        interleave,
        draw(st.integers(1, 3)) if dcp_size == 1 else 1,
        kv_layout=draw(st.sampled_from(["NHD", "HND"])),
        interleaved=draw(st.booleans()),
    )


@settings(max_examples=examples(120), deadline=None)
@given(data=st.data(), cp_share=st.sampled_from(["pages", "layers"]), seed=st.integers(0, 99))
def test_every_byte_arrives_once_and_no_other_is_touched(data, cp_share, seed):
    model = data.draw(models())
    src = data.draw(sides(model, is_source=True))
    dst = data.draw(sides(model, is_source=False))
    first = data.draw(st.integers(max(src.start, dst.start), model.num_tokens))
    for _, _, plan in check_fleets(model, src, dst, first=first, cp_share=cp_share, seed=seed):
        assert_nonempty_and_joined(plan, src.tp_size == dst.tp_size)


def assert_nonempty_and_joined(plan, whole_rows):
    """Check that no block is empty and, for whole rows, that no two neighbours could be one."""
    src_end = dst_end = 0
    for src, dst, length in blocks(plan):
        assert length > 0
        assert not (whole_rows and src == src_end and dst == dst_end)
        src_end, dst_end = src + length, dst + length


FULL, FLAT = Model(tuple(range(15)), MHA, 2, 24), Model((0, 2, 3), MHA, 1, 30)


def heads(num_heads):
    return Model((0, 1), MHA, num_heads, 10)


SCENARIOS = {
    "55": [(FULL, Side(4, (4, 9)), Side(4, (8,), 2))],
    "56": [(heads(num_heads), Side(4, tp_size=src), Side(4, tp_size=dst))
           for src, dst, num_heads in [(4, 2, 8), (2, 4, 8), (1, 4, 2), (8, 2, 4), (8, 8, 2),
                                       (2, 8, 4), (4, 2, 1), (2, 4, 1)]],
    "58": [(Model((0,), {"k": 4}, 1, 29), Side(4), Side(4, dcp_size=2, dcp_interleave=n), 8)
           for n in (1, 2, 4, 8)],
    "60": [(Model((0,), MHA), Side(4, start=src), Side(4, start=dst), first)
           for src, dst, first in [(0, 8, 8), (8, 0, 10), (4, 4, 24), (0, 8, 24), (4, 4, 9)]],
}  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenarios(scenario):
    for model, src, dst, *first in SCENARIOS[scenario]:
        links = check_fleets(model, src, dst, first=first[0] if first else 0, seed=5)
        pairs = [link[:2] for link in links]
        if scenario == "55":
            assert pairs == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3), (2, 2), (2, 3)]
        elif scenario == "56" and src.tp_size == dst.tp_size:
            assert pairs == [(rank, rank) for rank in range(src.tp_size)]
        elif scenario == "58":
            whole_pages = all((link.plan.lengths % (4 * 4) == 0).all() for link in links)
            assert whole_pages == (dst.dcp_interleave % 4 == 0)
        elif scenario == "60":
            assert len(links) == (first[0] < 24)


@pytest.mark.parametrize("share", ["pages", "layers"])
def test_scenario_61_ranks_share_pages_or_layers(share):
    for cp_size, dst in pairwise([2, 3, 5], [Side(4), Side(2), Side(4, dcp_size=2)]):
        sent = [0] * cp_size
        for source, _, plan in check_fleets(FLAT, Side(4, cp_size=cp_size), dst, cp_share=share):
            sent[source] += plan.total_bytes
        unit = 7 * 4 * 3 if share == "pages" else 7 * 32  # a page's layers, or a layer
        assert max(sent) - min(sent) <= unit


def with_left_out(server, layers):
    """Return the layout of a server that keeps no index keys for these layers."""
    fields = server.layout.to_dict()
    fields["entries"] = [
        entry._replace(addr=0, nbytes=0, item_len=0)
        if entry.kind == "index_k" and entry.layer_id in layers and not entry.is_draft
        else entry
        for entry in server.layout.entries
    ]
    return KVLayout.from_dict(fields)


@settings(max_examples=examples(40), deadline=None)
@given(
    st.sets(st.integers(0, 3)), st.sets(st.integers(0, 3)), st.booleans(),
    st.sampled_from(["pages", "layers"]),
)  # fmt: skip
def test_index_keys_that_a_side_left_out(src_without, dst_without, is_striped, cp_share):
    """All other buffers are sent as if nothing was left out, and no index keys where none are."""
    model = Model((0, 1, 2, 3), MLA)
    side = Side(4, shard_size=2) if is_striped else Side(4, borders=(2,), cp_size=2)
    sources, (to,) = servers(model, side, 3), servers(model, Side(4), 4)
    ranks = [source.cp_rank for source in sources]

    def blocks_without(src_left_out, dst_left_out):
        links = plan_kv_links(
            [with_left_out(source, src_left_out) for source in sources],
            [with_left_out(to, dst_left_out)], [source.pages for source in sources], [to.pages],
            cp_ranks=ranks, cp_size=side.cp_size, cp_share=cp_share,
        )  # fmt: skip
        return [(link.source, *block) for link in links for block in blocks(link.plan)]

    left_out = [
        range(entry.addr, entry.addr + entry.nbytes)
        for entry in to.entries
        if entry.kind == "index_k" and entry.layer_id in src_without | dst_without
    ]
    whole = blocks_without((), ())
    expected = [block for block in whole if not any(block[2] in buffer for buffer in left_out)]
    assert blocks_without(src_without, dst_without) == expected
    assert len(expected) < len(whole) or not left_out


def fleets(src=None, dst=None, model=FULL):
    return servers(model, src or Side(4), 0), servers(model, dst or Side(4), 1)


def plan(sources, destinations, **arguments):
    return plan_kv_links(
        [server.layout for server in sources], [server.layout for server in destinations],
        [server.pages for server in sources], [server.pages for server in destinations],
        **arguments,
    )  # fmt: skip


def assert_refused(message, *sides, **arguments):
    with pytest.raises(ValueError, match=re.escape(message)):
        plan(*sides, **arguments)


def test_what_nobody_or_two_send_is_refused():
    sources, destinations = fleets(Side(4, (7,)), Side(4, tp_size=2))
    message = " of destination 0, heads [0, 1), tokens [0, 24), must be sent by one source"
    assert_refused(message + ", got no source", sources[:1], destinations)
    sources, destinations = fleets(Side(4, tp_size=2))
    assert_refused("heads [1, 2), tokens [0, 24), must be sent", sources[:1], destinations)
    sources, destinations = fleets(Side(4, cp_size=3))
    message = "tokens [8, 16), must be sent by one source"
    assert_refused(message, sources[::2], destinations, cp_ranks=[0, 2], cp_size=3)
    sources, destinations = fleets()
    message = "tokens [0, 24), must be sent by one source, got sources 0 and 1"
    assert_refused(message, sources * 2, destinations)


def test_striped_pages_that_nobody_or_two_send_are_refused():
    sources, destinations = fleets(Side(4, shard_size=2))
    for source in sources:
        source.pages[:] = [0, 2, 1, 4, 6, 3]
    message = "tokens [8, 12), must be sent by one source, got "
    assert_refused(message + "no source", sources[:1], destinations)
    assert_refused(message + "sources 1 and 2", [*sources, sources[1]], destinations)
    sources[1].pages[:] = [0, 2, 1, 4, 5, 3]  # ranks mean different pages
    assert_refused("tokens [16, 20), must be sent by one source", sources, destinations)


def test_buffers_that_two_links_would_write_are_refused():
    sources = [
        KVLayout([KVEntry(i, "k", False, i << 20, 512, 512)], 16, layers=(i, i + 1))
        for i in range(2)
    ]
    near = [KVEntry(i, "k", False, (1 << 49) + i * 256, 512, 512) for i in range(2)]
    with pytest.raises(ValueError, match="destination buffers must not overlap, got k of layer 0"):
        plan_kv_links(sources, [KVLayout(near, 16)], [[0], [0]], [[0]])


def test_errors_of_a_link_name_it():
    sources, destinations = fleets(dst=Side(4, (7,)))
    message = r"^plan_kv_links: [kv] of layer \d+ of source 0 must have a destination$"
    with pytest.raises(ValueError, match=message):
        plan(sources, destinations[:1])
    sources, destinations = fleets(Side(4, (7,)))
    sources[1].pages[0] = 99
    message = "source pages must be in .* got 99 at index 0, from source 1 to destination 0$"
    with pytest.raises(ValueError, match=message):
        plan(sources, destinations)
    assert_refused("cp_ranks must be given with cp_size 2", sources, destinations, cp_size=2)
    message = "cp_ranks must be one for each of 2 sources, got 1"
    assert_refused(message, sources, destinations, cp_ranks=[0])
    with pytest.raises(ValueError, match="src_pages must be a list for each of 2 peers, got 0"):
        plan_kv_links([s.layout for s in sources], [], [], [])


def test_totals_of_links():
    sources, destinations = fleets(Side(4, borders=(1,)), model=Model((0, 1), MHA))
    links = plan(sources, destinations)
    assert links.total_bytes == 2 * 24 * 7
    lines = str(links).splitlines()
    assert lines[0].split() == ["link", "buffers", "blocks", "bytes", "mean", "block"]
    assert [line.split()[0] for line in lines[1:]] == ["0", "1", "total"]
    assert "1 × k" in lines[1]
    assert len({len(line) for line in lines}) == 1


def test_a_link_is_a_plan_of_its_own():
    sources, destinations = fleets(Side(4, borders=(7,), tp_size=2))
    for source, _, linked in plan(sources, destinations):
        server, to = sources[source], destinations[0]
        assert linked == plan_kv_transfer(server.layout, to.layout, server.pages, to.pages)
