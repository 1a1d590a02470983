# SPDX-License-Identifier: Apache-2.0
"""LAYOUT compares the orders of two sides by where every element lies, and names the orders."""

import itertools
import random

import pytest

from cpattn_proof import NotUsable, lint


def side(*axes, **more):
    names = ("axis", "size", "stride")
    return {"axes": [dict(zip(names, axis, strict=False)) for axis in axes], **more}


def lint_of(writer, reader):
    layouts = [{"buffer": "keys", "writer": writer, "reader": reader}]
    return lint({"schema": "cpattn-plan/1", "layouts": layouts})


def places(one):
    """Return the byte of every element by its index along the axes in alphabetical order."""
    pieces, step = [], one.get("itemsize", 1)
    for piece in reversed(one["axes"]):
        stride = piece.get("stride", step)
        pieces.insert(0, (piece["axis"], piece["size"], stride))
        step = stride * piece["size"]
    found = {}
    for digits in itertools.product(*(range(size) for _, size, _ in pieces)):
        index, byte = {}, one.get("offset", 0)
        for digit, (axis, size, stride) in zip(digits, pieces, strict=True):
            index[axis] = index.get(axis, 0) * size + digit
            byte += digit * stride
        found[tuple(index[axis] for axis in sorted(index))] = byte
    return found


def random_side(rng):
    """Return a side with four tokens, two heads and six dims in some order and tiling."""
    pieces = [("head", 2)]
    pieces += rng.choice([[("token", 4)], [("token", 2), ("token", 2)]])
    pieces += rng.choice([[("dim", 6)], [("dim", 3), ("dim", 2)]])
    rng.shuffle(pieces)
    return side(*pieces, itemsize=rng.choice([2, 2, 2, 1]), offset=rng.choice([0, 0, 0, 4]))


def test_two_sides_agree_if_all_elements_are_in_one_place():
    rng = random.Random(5)
    equal = 0
    for _ in range(300):
        writer, reader = random_side(rng), random_side(rng)
        if rng.random() < 0.3:
            reader = {**writer, "axes": [dict(axis) for axis in writer["axes"]]}
        written, read = places(writer), places(reader)
        report = lint_of(writer, reader)
        assert report.proved == (written == read), (writer, reader)
        equal += report.proved
        for found in report.findings:
            details = found.details
            order = list(dict.fromkeys(piece["axis"] for piece in writer["axes"]))
            index = dict(zip(order, details["element"], strict=True))
            at = tuple(index[axis] for axis in sorted(index))
            assert (written[at], read[at]) == (details["written"], details["read"])
            assert details["written"] != details["read"]
    assert 60 < equal < 200


@pytest.mark.parametrize(
    ("writer", "reader", "kind", "said"),
    [
        (
            side(("token", 4), ("head", 2)), side(("token", 4), ("head", 3)), "layout-extent",
            "the writer writes 2 heads of keys, the reader reads 3 heads",
        ),
        (
            side(("token", 4), ("head", 2)), side(("token", 4)), "layout-extent",
            "the writer writes 2 heads of keys, the reader reads no head at all",
        ),
        (
            side(("token", 4)), side(("token", 4), ("head", 2)), "layout-extent",
            "the reader reads 2 heads of keys, the writer writes no head at all",
        ),
        (
            side(("token", 4), dtype="int8"), side(("token", 4), dtype="float8_e4m3fn"),
            "layout-dtype", "the writer writes int8 to keys, the reader reads float8_e4m3fn",
        ),
        (
            side(("token", 4), scales=["token", "head"]), side(("token", 4), scales=["head"]),
            "layout-scale", "the writer writes a scale of keys for each head and token, the reader "
            "takes one for each head",
        ),
        (
            side(("token", 4), scales=[]), side(("token", 4), scales=["head"]), "layout-scale",
            "the writer writes a scale of keys for all of it, the reader takes one for each head",
        ),
    ],
)  # fmt: skip
def test_what_differs_is_named(writer, reader, kind, said):
    (found,) = lint_of(writer, reader).findings
    assert (found.invariant, found.kind, found.what) == ("LAYOUT", kind, said)
    assert lint(found.details["smaller"], shrink=False).findings[0].kind == kind
    assert lint_of(writer, writer).proved


def test_names_of_orders_are_compared_where_bytes_are_sent():
    def report(**changes):
        one = {"layer": 3, "kind": "k", "addr": 0, "nbytes": 64, "item_len": 16}
        one |= {"layout_tag": "tiles", "dtype": "int8"}
        other = {key: value for key, value in (one | changes).items() if value is not None}
        memories = {
            "prefill": {"page_size": 4, "entries": [one]},
            "decode": {"page_size": 4, "entries": [other]},
        }
        transfer = {"from": "prefill", "to": "decode", "src_pages": [1], "dst_pages": [1]}
        transfer |= {"src": [16], "dst": [16], "length": [16]}
        return lint({"schema": "cpattn-plan/1", "memories": memories, "transfers": [transfer]})

    assert report().checked == ("XFER", "LAYOUT")
    assert report(dtype=None).proved
    (found,) = report(layout_tag=None).findings
    assert found.what == (
        "k of layer 3 of prefill is tiles, that of decode is rows, and bytes are sent as they are"
    )
    (found,) = report(dtype="float16").findings
    assert found.kind == "layout-dtype"


def test_axes_have_a_size():
    with pytest.raises(NotUsable, match=r"layouts\[0\].writer.axes\[0\].size: must be at least 1"):
        lint_of(side(("token", 0)), side(("token", 1)))
