# SPDX-License-Identifier: Apache-2.0
"""Target of the fuzzer: `KVLayout.from_dict` with any data of a peer."""

import copy
import json
import pickle
from typing import Any

from cpattn.transfer import KVLayout

from .reader import Reader

KINDS = ("k", "v", "index_k", "state")


def entry_of(reader: Reader, layer: int) -> Any:
    page = reader.between(1, 64)
    entry = [
        reader.mostly(layer),
        reader.mostly(reader.one_of(KINDS)),
        reader.mostly(reader.flag()),
        reader.mostly(2**40 + layer * 2**20),
        reader.mostly(page * reader.between(0, 9)),
        reader.mostly(page),
        reader.mostly(reader.flag()),
    ]
    if reader.rarely(4):
        stride = page * reader.between(1, 3)
        entry[4] = reader.mostly(stride * reader.between(0, 8) + page)
        entry += ["", reader.mostly(stride), reader.mostly(reader.one_of(("NHD", "HND")))]
    if reader.rarely():
        entry = entry[: reader.between(0, 10)]
    return reader.mostly(tuple(entry) if reader.flag() else entry, 128)


def fields_of(reader: Reader) -> dict[Any, Any]:
    tp_size = reader.one_of((1, 2, 4))
    dcp_size = reader.between(1, 3)
    shard_size = 1 if dcp_size > 1 else reader.between(1, 3)
    fields: dict[Any, Any] = {
        "entries": [entry_of(reader, layer) for layer in range(reader.between(0, 5))],
        "page_size": reader.mostly(reader.between(1, 64)),
        "tp_rank": reader.mostly(reader.between(0, tp_size - 1)),
        "tp_size": reader.mostly(tp_size),
        "total_kv_heads": reader.mostly(reader.one_of((None, 1, 2, 4, 8))),
        "layers": reader.mostly(None if reader.flag() else [reader.mostly(0), reader.mostly(8)]),
        "dcp_rank": reader.mostly(reader.between(0, dcp_size - 1)),
        "dcp_size": reader.mostly(dcp_size),
        "dcp_interleave": reader.mostly(reader.between(1, 4)),
        "shard_rank": reader.mostly(reader.between(0, shard_size - 1)),
        "shard_size": reader.mostly(shard_size),
    }
    fields["entries"] = reader.mostly(fields["entries"], 128)
    if reader.rarely():
        del fields[reader.one_of(list(fields))]
    if reader.rarely():
        fields[reader.one_of(("_pools", "self", "", 7, None))] = 1
    return fields


def run(data: bytes) -> None:
    fields = fields_of(Reader(data))
    try:
        layout = KVLayout.from_dict(fields)
    except (ValueError, TypeError):
        return
    written = layout.to_dict()
    for other in (
        KVLayout.from_dict(written),
        KVLayout.from_dict(json.loads(json.dumps(written))),
        pickle.loads(pickle.dumps(layout)),
        copy.deepcopy(layout),
    ):
        assert other == layout
        assert other.to_dict() == written
    assert repr(layout).startswith("KVLayout(")
    assert [list(entry) for entry in layout.entries] == written["entries"]
    for entry in layout.entries:
        if entry.item_len == 0:  # it was left out
            assert entry.nbytes == 0
            assert entry.kind in ("index_k", "state")
        else:
            stride = entry.page_stride or entry.item_len
            assert stride >= entry.item_len
            assert entry.nbytes == 0 or (entry.nbytes - entry.item_len) % stride == 0
            assert entry.kv_layout == "NHD" or entry.token_rows
    assert all(entry.addr + entry.nbytes <= 2**64 for entry in layout.entries)
    assert 0 <= layout.tp_rank < layout.tp_size
    assert 0 <= layout.dcp_rank < layout.dcp_size
    assert 0 <= layout.shard_rank < layout.shard_size
    assert 1 in (layout.dcp_size, layout.shard_size)
