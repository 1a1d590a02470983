# SPDX-License-Identifier: Apache-2.0
"""Plans over interleaved pages, and over heads before tokens, are proved; faults are refuted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpattn.transfer import KVEntry, KVLayout, plan_kv_links
from cpattn_proof import NotUsable, lint
from cpattn_proof.linting.adapters.transfers import (
    from_transfer,
    joined,
    memory_of_lists,
    memory_of_pool,
)
from support.proof.plans import kinds

PAGES, HEADS, DIM = 9, 4, 8


def layout(page_size, kv_layout, interleaved, begin, tp_rank=0, tp_size=1):
    """Describe K and V of two layers, in one cache [pages, layers, 2, ...] if interleaved."""
    item = page_size * HEADS // tp_size * DIM
    stride, nbytes = (4 * item, (4 * PAGES - 3) * item) if interleaved else (None, PAGES * item)
    step = item if interleaved else nbytes
    entries = [
        KVEntry(i // 2, "kv"[i % 2], False, begin + i * step, nbytes, item, page_stride=stride,
                kv_layout=kv_layout)
        for i in range(4)
    ]  # fmt: skip
    return KVLayout(entries, page_size, tp_rank=tp_rank, tp_size=tp_size, total_kv_heads=HEADS)


def fleet(page_size, kv_layout, interleaved, tp_size, begin):
    return [
        layout(page_size, kv_layout, interleaved, begin + (rank << 20), rank, tp_size)
        for rank in range(tp_size)
    ]


def document(sources, targets, src_pages, dst_pages, num_tokens):
    links = plan_kv_links(
        sources, targets, [src_pages] * len(sources), [dst_pages] * len(targets),
        num_tokens=num_tokens,
    )  # fmt: skip
    return joined([
        from_transfer(
            sources[link.source], targets[link.destination], link.plan, src_pages, dst_pages,
            num_tokens=num_tokens, names=(f"source {link.source}", f"target {link.destination}"),
        )
        for link in links
    ])  # fmt: skip


PAGES_OF_SEQUENCE = st.permutations(range(PAGES))
SIDES = st.tuples(st.sampled_from(["NHD", "HND"]), st.booleans(), st.sampled_from([1, 2, 4]))


@given(
    st.sampled_from([1, 2, 4]), SIDES, SIDES, PAGES_OF_SEQUENCE, PAGES_OF_SEQUENCE,
    st.integers(1, 9), st.data(),
)  # fmt: skip
def test_plans_over_all_orders_and_strides_are_proved(
    page_size, src, dst, src_pages, dst_pages, num_tokens, data
):
    """Addresses may be those of devices, and some of these have all 64 bits."""
    begin = data.draw(st.sampled_from([1 << 30, (1 << 63) - 8192, 0xFFFF81AB54E01000]))
    sources, targets = fleet(page_size, *src, 4096), fleet(page_size, *dst, begin)
    pages = [some[: -(-num_tokens // page_size)] for some in (src_pages, dst_pages)]
    plans = document(sources, targets, *pages, num_tokens)
    report = lint(plans)
    assert (report.findings, report.checked) == ((), ("XFER",))
    transfer = data.draw(st.sampled_from(plans["transfers"]))
    one = data.draw(st.integers(0, len(transfer["length"]) - 1))
    name = data.draw(st.sampled_from(["src", "dst"]))
    transfer[name][one] += data.draw(st.sampled_from([-1, 1])) * transfer["length"][one]
    assert not lint(plans, shrink=False).proved


def small(kv_layout="HND", interleaved=True):
    sources, targets = (fleet(4, kv_layout, interleaved, 1, begin) for begin in (4096, 1 << 30))
    return document(sources, targets, [1, 3], [6, 5], 7)


def test_a_memory_that_is_said_in_another_order_is_refuted():
    """Heads of whole pages in one order may not go into pages in the other order."""
    plans = small()
    assert kinds(plans) == set()
    for entry in plans["memories"]["target 0"]["entries"]:
        entry["kv_layout"] = "NHD"
    (found,) = lint(plans).findings
    assert found.kind == "xfer-row"
    assert found.what.startswith("descriptor 0 copies 128 bytes over rows of 8 and 32 bytes")
    assert kinds(small("NHD")) == set()


def test_one_descriptor_may_have_pages_of_several_buffers():
    """A descriptor may span all buffers of a block, but nothing between the blocks."""
    plans = small("NHD")
    (transfer,) = plans["transfers"]
    begins = [plans["memories"][name]["entries"][0]["addr"] for name in ("source 0", "target 0")]
    transfer |= {
        "src": [begins[0] + page * 512 for page in (1, 3)],
        "dst": [begins[1] + page * 512 for page in (6, 5)],
        "length": [512, 512],
    }
    transfer.pop("tokens")
    assert lint(plans).proved
    transfer["dst"].reverse()
    assert "xfer-row" in kinds(plans)
    transfer["dst"].reverse()
    for memory in plans["memories"].values():
        memory["entries"].pop()
    assert "xfer-bounds" in kinds(plans)
    transfer["length"] = [384, 384]
    assert lint(plans).proved


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_stride": 96}, "no whole number of pages of 128 every 96"),
        ({"nbytes": 8 * 512}, "has 4,096 bytes, no whole number of pages of 128 every 512"),
        ({"heads": [0, 3]}, "pages of 128 bytes, no whole number for each of 4 tokens and 3 he"),
        ({"addr": 4096 + 64}, "k of layer 0 and v of layer 0 of source 0 have memory in common"),
    ],
)
def test_pages_that_do_not_lie_apart_are_refuted(change, message):
    plans = small()
    plans["memories"]["source 0"]["entries"][1] |= change
    found = next(one for one in lint(plans, shrink=False).findings if one.kind == "xfer-item")
    assert message in found.what


def test_buffers_that_no_stride_tells_apart_are_not_judged():
    plans = small()
    plans["memories"]["source 0"]["entries"][1] |= {"page_stride": 640, "nbytes": 8 * 640 + 128}
    report = lint(plans, shrink=False)
    assert report.findings == ()
    assert "k of layer 0 and v of layer 0 of source 0 are between pages of" in report.text()


def test_adapters_pass_stride_and_order():
    views = np.zeros((PAGES, 2, HEADS, 4, DIM), np.uint8)
    entries = [KVEntry.from_tensor(3, "kv"[i], views[:, i], kv_layout="HND") for i in range(2)]
    lists = list(zip(*((e.addr, e.nbytes, e.item_len) for e in entries), strict=True))
    memory = memory_of_lists(
        *lists, [(3, "k"), (3, "v")], page_size=4, page_strides=[256, 256], kv_layout="HND",
        heads=(0, HEADS),
    )  # fmt: skip
    assert memory["entries"][1] == {
        "layer": 3, "kind": "v", "addr": views.ctypes.data + 128, "nbytes": 8 * 256 + 128,
        "item_len": 128, "page_stride": 256, "kv_layout": "HND", "heads": [0, HEADS],
    }  # fmt: skip
    side = KVLayout(entries, 4, total_kv_heads=HEADS)
    blocks = [[entry.addr] for entry in entries]
    of_layout = from_transfer(side, side, [*blocks, [128]], [0], [0])["memories"]["source"]
    more = {"draft": False, "dtype": "uint8"}
    assert [entry | more for entry in memory["entries"]] == of_layout["entries"]

    class Pool:
        start_layer, page_size, num_kv_heads, kv_layout = 3, 4, HEADS, "HND"
        page_strides = {"k": 256, "v": 256}  # noqa: RUF012

        def get_contiguous_buf_infos(self):
            return lists

    assert memory_of_pool(Pool()) == memory


def test_order_of_heads_needs_heads():
    plans = small()
    del plans["memories"]["target 0"]["entries"][2]["heads"]
    with pytest.raises(NotUsable, match=r"entries\[2\]: must have heads with kv_layout 'HND'$"):
        lint(plans)
