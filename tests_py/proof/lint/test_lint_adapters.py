# SPDX-License-Identifier: Apache-2.0
"""Right documents from plans of engines are proved, and damaged ones refuted."""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cpattn
from cpattn.distributed.plans.plan import make_plan
from cpattn.kv import MHATokenToKVPool
from cpattn.transfer import KVEntry, KVLayout, plan_kv_transfer
from cpattn_proof import NotUsable, lint
from cpattn_proof.linting.adapters.context_parallel import from_metadata, from_plans
from cpattn_proof.linting.adapters.decode import from_local_lens
from cpattn_proof.linting.adapters.dsa import from_row_metadata
from cpattn_proof.linting.adapters.packings import from_llama3, from_zigzag_ring
from cpattn_proof.linting.adapters.transfers import from_transfer, joined, memory_of_pool
from support.proof.plans import kinds


def test_slots_and_pages_of_others_are_found_and_what_is_no_plan_is_refused():
    metadata = cpattn.build_cp_metadata_all_ranks([4, 2], [5, 2], cp_size=2)
    given = {"block_tables": [[2, 0], [1, -1]], "out_cache_loc": None, "page_size": 4}
    first, second = (make_plan(one, [4, 2], pad_to_physical=False, **given) for one in metadata)
    masked = replace(first, packed_custom_mask=np.zeros(3, np.uint8))
    with pytest.raises(NotUsable, match="plans must have no masks"):
        from_plans([masked, second])
    slots = np.array([10, *second.slots[1:]])
    second = replace(second, tokens=replace(second.tokens, given_slots=slots))
    assert kinds(from_plans([first, second], num_pages=3)) == {"own-slot"}
    assert kinds(from_plans([first, second], num_pages=2)) == {"own-slot", "len-pages", "addr-slot"}
    with pytest.raises(NotUsable, match="must have split_list or per_rank_actual_token"):
        from_metadata([SimpleNamespace()], [4])


def test_padding_is_left_out_and_the_token_before_it_is_not():
    lens, given = ([5, 3], [6, 9]), {"block_tables": [[0, 1, -1], [2, 3, 4]], "page_size": 4}
    options = {"cp_size": 3, "strategy": "interleave", "num_tokens": 12}
    metadata = cpattn.build_cp_metadata_all_ranks(*lens, **options)
    given |= {"out_cache_loc": None, "pad_to_physical": False}
    document = from_plans([make_plan(one, lens[0], **given) for one in metadata], num_pages=5)
    assert document["requests"][1] == {"prefix": 6, "extend": 3, "pad": 4}
    assert lint(document).proved
    for rank in document["ranks"]:
        rank["segments"]["keys"][-1] += 1
        rank["writes"]["count"][-1] -= 1
    assert kinds(document) >= {"own-slot", "pad-keys"}


def test_pages_of_another_sequence_are_found_and_verified_rows_judged_by_their_lengths():
    options = {"block_size": 4, "num_blocks": 8}
    right = [[[0, 1], [2, -1]]]
    assert kinds(from_local_lens([7, 3], [[7, 3]], right, **options)) == set()
    assert "len-keys" in kinds(from_local_lens([7, 3], [[8, 3]], right, **options))
    assert kinds(from_local_lens([7, 3], [[7, 3]], [[[0, 2], [2, -1]]], **options)) == {"len-pages"}
    report = lint(from_local_lens([9], [[5], [4]], block_size=4, query_lens=[3]))
    assert report.proved
    assert "COV" not in report.checked
    seen = [[4, 4, 5], [3, 4, 4]]  # these rows see 7, 8 and 9 tokens
    for change, found in ((0, set()), (1, {"cov-shard"})):
        seen[1][0] += change
        options = {"block_size": 4, "query_lens": [3], "row_lens": seen}
        assert kinds(from_local_lens([9], [[5], [4]], **options)) == found


@given(st.lists(st.integers(1, 8), min_size=1, max_size=3), st.integers(1, 4), st.data())
def test_zigzag_rings(blocks, cp_size, data):
    padded = np.cumsum([0, *(2 * cp_size * size for size in blocks)])
    pads = [data.draw(st.integers(0, 2 * cp_size * size - 1)) for size in blocks]
    report = lint(from_zigzag_ring(np.cumsum([0, *(np.diff(padded) - pads)]), cp_size, padded))
    assert report.findings == ()
    assert {"OWN", "COV", "PAD"} <= set(report.checked)


def test_a_ring_whose_lengths_are_divided_is_refuted():
    lens = [[698 // 4]] * 4
    kinds_of_both = {"cov-pair", "len-keys"}  # a quarter is more than rank 0 has
    assert kinds(from_zigzag_ring([0, 698], 4, [0, 704], lens)) == kinds_of_both
    with pytest.raises(NotUsable, match="must be multiples of 8 and hold the sequences, got"):
        from_zigzag_ring([0, 698], 4)


def llama3(cu_seqlens, ranks):
    """Yield each rank's rows, and its keys from the start of its first sequence."""
    size = cu_seqlens[-1] // ranks
    for rank in range(ranks):
        begin, end = rank * size, (rank + 1) * size
        cuts = [begin, *[c for c in cu_seqlens if begin < c < end], end]
        first = max(c for c in cu_seqlens if c <= begin)
        yield [c - begin for c in cuts], [0, *(c - first for c in cuts[1:])], slice(first, end)


def test_consecutive_rows_over_gathered_keys():
    cu_seqlens = [0, 5, 12, 24]
    ranks = list(llama3(cu_seqlens, 3))
    for window in (None, 3):
        assert kinds(from_llama3(cu_seqlens, ranks, window=window)) == set()
    ranks[1] = (ranks[1][0], ranks[1][1], slice(ranks[1][2].start + 1, 16))
    assert "cov-pair" in kinds(from_llama3(cu_seqlens, ranks))
    with pytest.raises(NotUsable, match="rank 0 must have as many offsets of queries as of keys"):
        from_llama3([0, 4], [([0, 4], [0, 1, 4], slice(0, 4))])


def layout_of(layers, begin):
    entries = []
    for layer in layers:
        for kind, item in (("k", 512), ("v", 256)):
            entries.append(KVEntry(layer, kind, False, begin, 9 * item, item))
            begin += 9 * item
    return KVLayout(entries, 8, total_kv_heads=4, layers=(layers.start, layers.stop))


def transferred(**options):
    source, target = layout_of(range(3), 4096), layout_of(range(3), 1 << 30)
    plan = plan_kv_transfer(source, target, [1, 3, 5], [4, 6, 0])
    return from_transfer(source, target, plan, [1, 3, 5], [4, 6, 0], **options)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("length", lambda t: t["length"][0] + 512, "xfer-page"),
        ("dst", lambda t: t["dst"][1], "xfer-overlap"),
        ("dst", lambda t: t["dst"][3], "xfer-pair"),
        ("src", lambda t: t["src"][0] + 512, "xfer-page"),
        ("src", lambda t: 0, "xfer-bounds"),
        ("dst", lambda t: 1 << 40, "xfer-bounds"),
    ],
)
def test_damaged_descriptors_are_refuted(name, value, kind):
    document = transferred()
    assert kinds(document) == set()
    (transfer,) = document["transfers"]
    transfer[name][0] = value(transfer)
    assert kind in kinds(document)
    for entry in document["memories"]["target"]["entries"]:
        entry["addr"] += 2**63
    transfer["dst"] = [at + 2**63 for at in transfer["dst"]]
    document["memories"]["target"].pop("registered", None)
    (found,) = (one for one in lint(document, shrink=False).findings if one.kind == kind)
    assert name != "dst" or re.search(r"0x8\w{15}", found.text())


def test_a_descriptor_too_few_and_a_sequence_longer_than_its_pages_are_refuted():
    document = transferred()
    for name in ("src", "dst", "length"):
        document["transfers"][0][name].pop()
    assert "xfer-missing" in kinds(document)
    document = transferred(num_tokens=24)
    assert kinds(document) == set()
    document["transfers"][0]["tokens"] = 25
    (found,) = lint(document).findings
    assert found.what == "25 tokens are sent, of which 3 pages of source can hold 24"
    document = transferred()  # a descriptor without bytes may point anywhere
    for name, value in {"src": 0, "dst": 1 << 50, "length": 0}.items():
        document["transfers"][0][name].insert(0, value)
    assert lint(document).checked == ("XFER",)
    assert kinds(document) == set()


def test_stages_of_a_pipeline():
    target = layout_of(range(5), 1 << 30)

    def stage(name, layers, begin):
        source = layout_of(layers, begin)
        plan = plan_kv_transfer(source, target, [1, 4], [1, 4])
        return from_transfer(source, target, plan, [1, 4], [1, 4], names=(name, "decode"))

    first, second = stage("first", range(2), 4096), stage("second", range(2, 5), 1 << 20)
    report = lint(joined([first, second]))
    assert (report.proved, report.checked) == (True, ("XFER",))
    with pytest.raises(NotUsable, match="memories of one name must be alike, 'first' are not"):
        joined([first, stage("first", range(2, 5), 4096)])
    for column in ("src", "dst", "length"):
        second["transfers"][0][column].pop()
    assert kinds(joined([first, second])) == {"xfer-missing"}
    sizes = {"size": 64, "page_size": 8, "num_kv_heads": 2, "head_dim": 16}
    with pytest.raises(NotUsable, match=r"buffers of each of \['k', 'v', 'index_k'\], got 10"):
        memory_of_pool(MHATokenToKVPool(num_layers=5, **sizes), ("k", "v", "index_k"))


def test_a_row_that_sees_more_pages_than_there_are_is_refused():
    def of_lines(pages):
        rank = SimpleNamespace(block_tables=[[2] * pages], actual_seq_lengths_kv=[9])
        return from_row_metadata([rank], [[0]], [1], [8], [[2, 2]], page_size=4)

    for pages in (1, 2, 3):
        with pytest.raises(NotUsable, match="row 0 of rank 0 must have the pages of a sequence"):
            of_lines(pages)
