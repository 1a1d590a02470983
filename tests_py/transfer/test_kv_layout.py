# SPDX-License-Identifier: Apache-2.0
"""KVLayout describes a side, from entries, from pools, or from an engine's arguments."""

import json
import pickle
import re
from types import SimpleNamespace

import pytest

from cpattn.kv import MLATokenToKVPool
from cpattn.transfer import KVEntry, KVLayout, plan_kv_transfer

ENTRY = KVEntry(3, "k", False, 1 << 48, 4608, 512)


def test_a_comparable_value_that_travels():
    place = {"tp_rank": 3, "tp_size": 4, "total_kv_heads": 2, "layers": (2, 5)}
    layout = KVLayout([ENTRY, ENTRY._replace(is_draft=True, addr=0, token_rows=False)], 8, **place)
    assert layout.entries == (ENTRY, KVEntry(3, "k", True, 0, 4608, 512, False))
    assert KVLayout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert layout != KVLayout(layout.entries, 8)
    assert layout != KVLayout([ENTRY], 8, **place)
    assert repr(layout) == (
        "KVLayout(2 buffers of 2 layers, page_size=8, tp_rank=3, tp_size=4, total_kv_heads=2, "
        "layers=(2, 5))"
    )


IS_LAYER = "layers must hold integers, got "
HEADS = "total_kv_heads must"


@pytest.mark.parametrize(
    ("entry", "placement", "message"),
    [
        ({"kind": "q"}, {}, 'kind must be k, v, index_k, state, k_scale or v_scale, got "q"'),
        ({"layer_id": -1}, {}, "layer_id must be >= 0, got k of layer -1"),
        ({"kind": "index_k", "item_len": 0}, {}, "nbytes of index_k of layer 3 must be a multiple"),
        ({"nbytes": 4609}, {}, "nbytes of k of layer 3 must be a multiple of item_len 512 below"),
        ({}, {"tp_size": 2}, f"{HEADS} be given with tp_size 2, 1 for an MLA latent"),
        ({}, {"tp_size": 4, "total_kv_heads": 6}, f"{HEADS} divide tp_size 4 or be a"),
        ({}, {"shard_size": 2, "dcp_size": 2}, "dcp_size must be 1 with shard_size 2, got 2"),
        ({}, {"layers": (0, 3, 5)}, "layers must be a pair, got 3 values"),
        ({}, {"layers": (0, 2**64)}, "layers must fit into int64, got 18446744073709551616 at"),
        ({"addr": -1}, {}, "addr must be in [0, 2^64), got -1"),
        ({"kind": 3}, {}, "kind must be a str, got int"),
        ({"token_rows": 2}, {}, "token_rows must be a bool, got int"),
        ({"addr": True}, {}, "addr must be an integer, got bool"),
        ({}, {"layers": (0.0, 5)}, IS_LAYER + "float at index 0"),
    ],
)
def test_refused(entry, placement, message):
    error = TypeError if re.search("got (int|str|float|bool)", message) else ValueError
    with pytest.raises(error, match=f"^KVLayout: {re.escape(message)}"):
        KVLayout([ENTRY._replace(**entry)], **({"page_size": 8} | placement))


class Pool:
    """A pool with only the attributes that a layout asks for."""

    def __init__(self, kinds, start_layer, num_layers, item_lens, num_kv_heads=1, base=0):
        self.kinds, self.start_layer, self.num_layers = kinds, start_layer, num_layers
        self.num_kv_heads, self.page_size = num_kv_heads, 8
        lens = [length for length in item_lens for _ in range(num_layers)]
        addrs = [base + (i << 20) for i in range(len(lens))]
        self.infos = addrs, [9 * length for length in lens], lens

    def get_contiguous_buf_infos(self):
        return self.infos


def test_from_pool():
    pool = Pool(("k", "v", "index_k"), 4, 2, (64, 16, 8))
    pool.kv_lora_rank = 4
    draft = Pool(("k", "v"), 0, 1, (64, 16), base=1 << 40)
    layout = KVLayout.from_pool(pool, draft, layers=(4, 6), tp_rank=1, tp_size=4)
    assert layout.layers == (4, 6)
    assert layout.total_kv_heads == 1
    assert [entry[:3] for entry in layout.entries] == [
        *((layer, kind, False) for kind in ("k", "v", "index_k") for layer in (4, 5)),
        (0, "k", True),
        (0, "v", True),
    ]
    assert layout.entries[3] == KVEntry(5, "v", False, 3 << 20, 144, 16)


def test_from_pool_places_it_as_told():
    pool = Pool(("k", "v"), 4, 2, (64, 64), num_kv_heads=2)
    assert KVLayout.from_pool(pool).total_kv_heads == 2
    ranks = {"tp_rank": 1, "tp_size": 2, "total_kv_heads": 4, "layers": (4, 6)}
    places = ranks | {"dcp_rank": 1, "dcp_size": 2, "dcp_interleave": 8}
    layout = KVLayout.from_pool(pool, **places)
    assert {name: getattr(layout, name) for name in places} == places
    place = {"shard_rank": 1, "shard_size": 3}
    args = kv_args("K0 V0", prefill_end_layer=1)
    for layout in (
        KVLayout.from_pool(pool, **place),
        KVLayout.from_kv_args(args, is_mla=False, total_layers=1, **place),
    ):
        assert {name: getattr(layout, name) for name in place} == place
        assert repr(layout).endswith("shard_rank=1, shard_size=3)")
        assert KVLayout.from_dict(layout.to_dict()) == layout
        assert layout != KVLayout.from_dict(layout.to_dict() | {"shard_rank": 2})
    pool.kv_lora_rank = None  # this pool could hold latents, but does not
    assert KVLayout.from_pool(pool).total_kv_heads == 2
    for name, message in (("dtypes", "a dict of the dtype"), ("whole_page_kinds", "a list of k")):
        misnamed = Pool(("k", "v"), 4, 2, (64, 64), num_kv_heads=2)
        setattr(misnamed, name, "float32")
        with pytest.raises(TypeError, match=f"from_pool: {name} of a pool must be {message}"):
            KVLayout.from_pool(misnamed)
    other = Pool(("k", "v"), 0, 1, (64, 64))
    other.page_size = 16
    for message, draft, options in [
        ("total_kv_heads must be given with tp_size 4", None, {"tp_size": 4}),
        ("total_kv_heads 4 over tp_size 4 must be the 2 of", None, places | {"tp_size": 4}),
        ("page_size must be that of the draft pool, got 8 and 16", other, {}),
    ]:
        with pytest.raises(ValueError, match=message):
            KVLayout.from_pool(pool, draft, **options)
    with pytest.raises(TypeError, match=r"got an unexpected keyword argument 'layer'"):
        KVLayout.from_pool(pool, layer=(4, 6))


def test_what_is_no_pool_or_no_entry():
    message = "pool must be a KV pool, got NoneType, which has no kinds, start_layer, num_layers"
    with pytest.raises(TypeError, match=f"^KVLayout.from_pool: {message}"):
        KVLayout.from_pool(None)
    pool = Pool(("k", "v"), 0, 1, (64, 64))
    with pytest.raises(TypeError, match=r"^KVLayout.from_pool: draft_pool must be .* got list"):
        KVLayout.from_pool(pool, [pool])
    for entry in (("k", 0), 5, None):
        with pytest.raises(TypeError, match=r"^KVLayout: entries must be KVEntry\(layer_id, "):
            KVLayout([entry], 8)
    with pytest.raises(
        TypeError,
        match=r"page_stride=None, kv_layout='NHD', layout_tag=''\), got \(0, 'k', 1, .*, \.\.\.\)$",
    ) as error:
        KVLayout([(0, "k", 1, 2, 3, 4, 5, 6) * 200], 4)
    assert len(str(error.value)) < 300
    with pytest.raises(TypeError, match=r"^KVLayout.from_dict: fields must be a mapping"):
        KVLayout.from_dict([])


# --- the lists of engines, in cases that pairing by position gets right and wrong -------------

LENGTHS = {"K": 512, "V": 128, "I": 64}


def kv_args(names, start=0, **fields):
    """Make buffers named as in "K0 K1 V0 V1 dK0 dV0"; the address tells the name."""
    names = names.split()
    lens = [LENGTHS[name.removeprefix("d")[0]] for name in names]
    return SimpleNamespace(
        kv_data_ptrs=[(1 << 48) + (i << 20) for i in range(len(names))],
        kv_data_lens=[16 * length for length in lens],
        kv_item_lens=lens,
        page_size=8,
        prefill_start_layer=start,
        **fields,
    )


def names(count, groups="KV", draft=0, start=0):
    """Return K0 K1 ... V0 V1 ..., then the names of draft layers."""
    target = [f"{group}{layer}" for group in groups for layer in range(start, start + count)]
    return " ".join(target + [f"d{group}{layer}" for group in groups for layer in range(draft)])


def received(src_names, src, dst_names, dst):
    """Return the name of the destination buffer that each source buffer is written to."""
    plan = plan_kv_transfer(src, dst, [0], [1])
    by_addr = {
        entry.addr + entry.item_len: name
        for entry, name in zip(dst.entries, dst_names.split(), strict=True)
    }
    by_src = dict(zip((entry.addr for entry in src.entries), src_names.split(), strict=True))
    return {
        by_src[from_]: by_addr[to]
        for from_, to in zip(plan.src_addrs.tolist(), plan.dst_addrs.tolist(), strict=True)
    }


def args_layout(buffers, start=0, *, is_mla=True, options=(), **fields):
    """Return the layout of `kv_args` of these buffers."""
    return KVLayout.from_kv_args(kv_args(buffers, start, **fields), is_mla=is_mla, **dict(options))


def assert_paired(src_names, src, dst_names, dst):
    """Check that each buffer arrives in the one of its name, if the destination has it."""
    sent = [name for name in src_names.split() if name in dst_names.split()]
    assert received(src_names, src, dst_names, dst) == {name: name for name in sent}


@pytest.mark.parametrize(
    ("total", "draft", "start", "end"), [(15, 0, 0, 7), (5, 0, 3, 5), (4, 2, 2, 4), (4, 4, 0, 4)]
)
def test_every_stage_of_mha_is_right(total, draft, start, end):
    """Scenarios 53 and 54 for MHA have draft layers on the decode side, none for prefill."""
    dst_names, src_names = names(total, draft=draft), names(end - start, start=start)
    known = {"total_layers": total}
    dst = args_layout(dst_names, is_mla=False, options=known | {"draft_layers": draft})
    src = args_layout(src_names, start, is_mla=False, options=known, prefill_end_layer=end)
    assert_paired(src_names, src, dst_names, dst)


MLA = {
    # A case has groups; source, its first layer and drafts; destination, its first and drafts.
    "A": ("KVI", names(2, "KVI", start=2), 2, 0, names(4, "KVI"), 0, 0),
    "B": ("KV", names(2), 0, 0, names(4, draft=1), 0, 1),
    "B, last, and C": ("KV", names(2, start=2), 2, 0, names(4, draft=1), 0, 1),
    "D": ("KVI", names(1, "KVI", start=3), 3, 0, names(4, "KVI"), 0, 0),
    "E": ("KV", names(2, draft=1, start=2), 2, 1, names(4, draft=1), 0, 1),
    "F": ("KV", names(4), 0, 0, names(4, draft=1), 0, 1),
    "I: both have the stage": ("KV", names(2, start=2), 2, 0, names(2, draft=1, start=2), 2, 1),
    "thin stage with draft": ("KVI", names(3, "KVI", 1, 1), 1, 1, names(4, "KVI", 1), 0, 1),
}


@pytest.mark.parametrize("case", MLA)
def test_every_case_of_mla_is_right(case):
    """Scenario 54 for MLA has C, with the number of hidden layers stated, and E right, too."""
    groups, src_names, start, src_draft, dst_names, dst_start, dst_draft = MLA[case]
    common = {"kv_buf_groups": len(groups), "hidden_kv_layers": 4}
    src = args_layout(src_names, start, draft_kv_layers=src_draft, **common)
    dst = args_layout(dst_names, dst_start, draft_kv_layers=dst_draft, **common)
    assert dst.layers == ((2, 4) if dst_start else None)
    assert_paired(src_names, src, dst_names, dst)


def lists(buffers, start=0, groups=None, hidden=None, end=None, ids=None, total=None):
    """Make arguments of an engine, without those that are None."""
    fields = {
        "kv_buf_groups": groups, "hidden_kv_layers": hidden, "prefill_end_layer": end,
        "kv_layer_ids": ids, "total_kv_layers": total,
    }  # fmt: skip
    present = {name: value for name, value in fields.items() if value is not None}
    return kv_args(buffers, start, **present)


SHORT = SimpleNamespace(**vars(lists("K0", total=1)) | {"kv_data_lens": []})
HOLD, EQUAL = "kv_data_ptrs must hold ", " of target layers must be equal, got [512, "


@pytest.mark.parametrize(
    ("args", "message"),
    [
        # C: the numbers of layers and of draft layers are both unknown
        (lists(names(4, draft=1), 0, 2), "total_layers must be given: hidden_kv"),
        (lists(names(4, draft=1), 0, 2, 4, 4), HOLD + "2 group(s) of layers [0, 4) and of 0 draft"),
        # G: the number of groups is left at one
        (lists(names(2, start=2), 2, None, 4, 4), HOLD + "1 group(s) of layers [2, 4) and of 0 dr"),
        (lists(names(4), 0, None, 8), f"kv_item_lens of group k{EQUAL}512, 512, 512, 128, "),
        # H: the stage ends beyond the model
        (lists(names(2, start=2), 2, 2, 3), "layers [2, 4) must lie within the model's 3"),
        # These thin stages counted draft buffers among those of layers, so groups are wrong.
        (lists(names(3, "KVI", 1), 0, 4, 3), "kv_buf_groups must be 1, 2 or 3, got 4"),
        (lists(names(2, draft=1), 0, 3, 2), f"kv_item_lens of group index_k{EQUAL}128]"),
        (lists("K0", ids=[0], total=1), "layers must be given with kv_layer_ids: prefill_end_laye"),
        (lists("K0 V0", 0, None, None, 1, [0], 1), "kv_layer_ids must have an id for each of 2 bu"),
        (lists("K0 V0 I0 K0", 0, None, None, 1, [0] * 4, 1), "kv_layer_ids must name a layer 3 ti"),
        (lists("K0", 0, None, None, 1, [-1], 1), "kv_layer_ids must lie in [0, 1), got -1"),
        (lists("K0", 0, None, None, 1, [1], 1), "kv_layer_ids must lie in [0, 1), got 1"),
        (SHORT, "kv_data_ptrs, kv_data_lens and kv_item_lens must be equally many, got 1, 0, 1"),
    ],
)
def test_lists_that_contradict_themselves_are_refused(args, message):
    with pytest.raises(ValueError, match=f"^KVLayout.from_kv_args: {re.escape(message)}"):
        KVLayout.from_kv_args(args, is_mla=True)


def test_case_h_the_destination_lacks_layers():
    src = args_layout(names(2, start=2), 2, kv_buf_groups=2, hidden_kv_layers=4)
    dst = args_layout(names(3), kv_buf_groups=2, hidden_kv_layers=3)
    message = re.escape("source has k of layer 3 (item_len 512), which destination has not")
    with pytest.raises(ValueError, match=message):
        plan_kv_transfer(src, dst, [0], [1])


def test_ids_pair_hybrid_subsets_whatever_their_order():
    """One layer in four has KV; K and V have the same ids, and drafts count from a million."""
    src_names, dst_names = "K11 K7 V7 V11 dK0 dV0", "K3 K7 K11 V3 V7 V11 dK0 dV0"
    src_ids = [11, 7, 7, 11, 1_000_000, 1_000_000]
    dst_ids = [3, 7, 11, 3, 7, 11, 1_000_000, 1_000_000]
    src, dst = (
        args_layout(
            buffers, start, is_mla=False, options={"total_layers": 12}, prefill_end_layer=12,
            kv_layer_ids=ids,
        )
        for buffers, start, ids in ((src_names, 6, src_ids), (dst_names, 0, dst_ids))
    )  # fmt: skip
    assert_paired(src_names, src, dst_names, dst)


def test_pools_and_their_arguments_say_the_same():
    sizes = {"size": 64, "page_size": 8, "kv_lora_rank": 16, "qk_rope_head_dim": 4}
    pool, draft = (
        MLATokenToKVPool(
            **sizes, num_layers=count, start_layer=start, index_head_dim=8, container="numpy"
        )
        for count, start in ((2, 3), (1, 0))
    )
    lists = zip(pool.get_contiguous_buf_infos(), draft.get_contiguous_buf_infos(), strict=True)
    addrs, lens, item_lens = ([*target, *tail] for target, tail in lists)
    args = SimpleNamespace(
        kv_data_ptrs=addrs, kv_data_lens=lens, kv_item_lens=item_lens, page_size=8, engine_rank=1,
        prefill_start_layer=3, prefill_end_layer=5, kv_buf_groups=3, hidden_kv_layers=5,
        draft_kv_layers=1,
    )  # fmt: skip
    of_args = KVLayout.from_kv_args(args, is_mla=True, tp_size=2)
    of_pool = KVLayout.from_pool(pool, draft, layers=(3, 5), tp_rank=1, tp_size=2)
    assert {entry.dtype for entry in of_pool.entries} == {"bfloat16"}
    fields = of_pool.to_dict()  # it has the dtype, which engines do not say
    fields["entries"] = [entry._replace(dtype="") for entry in of_pool.entries]
    assert of_args == KVLayout.from_dict(fields)
    assert all(entry.nbytes == 9 * entry.item_len for entry in of_args.entries)


def test_ranks_of_an_engine():
    args = kv_args("K0 V0", engine_rank=7, total_kv_head_num=2, dcp_rank=1, dcp_size=2)
    sizes = {"tp_size": 4, "total_layers": 1, "dcp_interleave": 8}
    layout = KVLayout.from_kv_args(args, is_mla=False, **sizes)
    assert (layout.tp_rank, layout.tp_size, layout.total_kv_heads) == (3, 4, 2)
    assert (layout.dcp_rank, layout.dcp_size, layout.dcp_interleave) == (1, 2, 8)
    args.engine_rank = None
    assert KVLayout.from_kv_args(args, is_mla=False, **sizes).tp_rank == 0
    with pytest.raises(ValueError, match=r"^KVLayout.from_kv_args: tp_size must be >= 1, got 0$"):
        KVLayout.from_kv_args(args, is_mla=False, tp_size=0)


def test_entries_of_drafts_are_layers_of_every_group():
    args = kv_args(names(2, draft=2), kv_buf_groups=2, hidden_kv_layers=2, num_draft_entries=4)
    layout = KVLayout.from_kv_args(args, is_mla=True)
    assert [str(entry.kind) for entry in layout.entries if entry.is_draft] == ["k", "k", "v", "v"]
    assert sum(not entry.is_draft for entry in layout.entries) == 4
