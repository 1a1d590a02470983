# SPDX-License-Identifier: Apache-2.0
"""Pages, groups and chunks of a prompt are right, and so is the description of a server's pools."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpattn.kv import MHATokenToKVPool, MLATokenToKVPool
from cpattn.transfer.sglang_0_5_23 import (
    KVArgs,
    KVSendCursor,
    build_transfer_entry_pairs,
    decode_targets,
    fill_kv_args,
    group_concurrent_contiguous,
    kv_start_layer,
    kv_to_page_indices,
    kv_to_page_num,
    setup_state_kv_args,
)


@given(st.lists(st.integers(0, 500), unique=True, max_size=20), st.integers(1, 9), st.data())
def test_pages_of_slots(pages, page_size, data):
    slots = [page * page_size + row for page in pages for row in range(page_size)]
    missing = data.draw(st.integers(0, page_size - 1)) if slots else 0
    slots = slots[: len(slots) - missing]
    assert kv_to_page_indices(slots, page_size).tolist() == pages
    for dtype in (np.int32, np.int64):
        found = kv_to_page_indices(np.repeat(np.array(slots, dtype), 2)[::2], page_size)
        assert found.tolist() == pages
        assert found.dtype == np.int32
    assert kv_to_page_num(len(slots), page_size) == len(pages)


def test_groups_go_on_where_both_sides_do():
    """tests_cpp/transfer/kv_pages_test.cc tests the rule itself."""
    for src, dst in (([2, 3, 7], (20, 21, 40)), (np.array([2, 3, 7]), [20, 21, 40])):
        assert group_concurrent_contiguous(src, dst) == ([[2, 3], [7]], [[20, 21], [40]])
        assert group_concurrent_contiguous(src, []) == ([], [])
        assert group_concurrent_contiguous([], dst) == ([], [])


def targets(rank, prefill, decode):
    return decode_targets(rank, prefill_tp_size=prefill, decode_tp_size=decode, is_mla=True)


def cursor(num_tokens=8, page_size=4, **options):
    return KVSendCursor(num_tokens, page_size, **options)


WHOLE, PAGE = cursor(12).advance(12, last_chunk=True), "page_size must be >= 1, got"
SHORT = r"pages \[0, 3\).*got {} of the source and 2 of the"
EQUAL = "group_concurrent_contiguous requires equal-length src/dst index arrays, got"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kv_to_page_indices([1], 0), f"{PAGE} 0"),
        (lambda: kv_to_page_num(3, -4), f"{PAGE} -4"),
        (lambda: kv_to_page_num(-1, 4), "num_tokens must be >= 0, got -1"),
        (lambda: group_concurrent_contiguous([1], [1, 2]), f"{EQUAL} 1 and 2"),
        (lambda: targets(0, 4, 6), "must divide the other, got 4 and 6"),
        (lambda: targets(0, 0, 6), "must divide the other, got 0 and 6"),
        (lambda: targets(-1, 2, 2), "engine_rank must be >= 0, got -1"),
        (lambda: cursor(-1), "^KVSendCursor: num_tokens must be >= 0, got -1"),
        (lambda: cursor(decode_prefix_len=-1), "decode_prefix_len must be >= 0, got -1"),
        (lambda: cursor(decode_prefix_len=9), "decode_prefix_len must be within the 8 tokens, got"),
        (lambda: cursor(decode_prefix_len=6), "must be a multiple of page_size 4, got 6"),
        (lambda: cursor().advance(-5), "KVSendCursor.advance: num_computed must be >= 0, got -5"),
        (lambda: cursor().advance(8, end=9), "end must be within the 8 tokens, got 9"),
        (lambda: cursor().advance(8, end=-1), "end must be >= 0, got -1"),
        # Slices end where lists do, so equally many pages on both sides need not be all of them.
        (lambda: WHOLE.select([*range(12)], [5, 6]), SHORT.format(3)),
        (lambda: WHOLE.select(list(range(8)), [5, 6]), SHORT.format(2)),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_compat_goes_on_as_engines_do():
    """A destination may be short of pages; a prefix may end in a page, and a tail is not sent."""
    src, dst = cursor(12, compat=True).advance(12, last_chunk=True).select([*range(12)], [5, 6])
    assert (src.tolist(), dst) == ([0, 1], [5, 6])
    chunk = cursor(10, decode_prefix_len=2, compat=True).advance(10, last_chunk=True)
    assert chunk.select([*range(10)], [0, 1])[0].tolist() == [0, 1]


@given(
    num_pages=st.integers(0, 12),
    tail=st.integers(0, 7),
    page_size=st.integers(1, 8),
    data=st.data(),
)
def test_chunks_send_every_page_once(num_pages, tail, page_size, data):
    """The pages of all chunks, one after the other, are those of the request after its prefix."""
    num_tokens = num_pages * page_size + tail % page_size
    prefix = data.draw(st.integers(0, num_tokens // page_size)) * page_size
    computed = sorted(data.draw(st.lists(st.integers(0, num_tokens), max_size=6)))
    slots = np.arange(1000 * page_size, 1000 * page_size + num_tokens)
    dst_pages = np.arange(kv_to_page_num(num_tokens - prefix, page_size)) + 7
    cursor = KVSendCursor(num_tokens, page_size, decode_prefix_len=prefix)
    sent = []
    for count in computed:
        chunk = cursor.advance(count)
        if chunk is None:
            assert count - count % page_size <= cursor.start_send_idx
            continue
        assert chunk.token_end == count - count % page_size
        assert chunk.is_last == (chunk.token_end == num_tokens)
        sent.append(chunk)
    sent.append(cursor.advance(num_tokens, last_chunk=True))
    assert sent[-1].is_last
    assert cursor.start_send_idx == num_tokens
    pairs = [chunk.select(slots, dst_pages) for chunk in sent]
    src = [page for pages, _ in pairs for page in pages.tolist()]
    dst = [page for _, pages in pairs for page in pages.tolist()]
    assert src == list(
        range(1000 + prefix // page_size, 1000 + kv_to_page_num(num_tokens, page_size))
    )
    assert dst == dst_pages.tolist()


def test_ends_of_chunks():
    last = KVSendCursor(130, 64).advance(500, last_chunk=True)  # generated tokens do not count
    assert (last.token_start, last.token_end, last.page_start, last.page_end) == (0, 130, 0, 3)
    cursor = KVSendCursor(16, 4)
    assert cursor.advance(16, end=9).token_end == 8
    assert cursor.advance(16, end=4) is None
    assert cursor.advance(16, end=16).token_end == 16
    all_cached = KVSendCursor(8, 4, decode_prefix_len=8).advance(8, last_chunk=True)
    assert all_cached.is_last  # it carries the metadata
    assert all_cached.page_start == all_cached.page_end == 0
    assert KVSendCursor(0, 1).advance(0) is None
    assert KVSendCursor(0, 1).advance(0, last_chunk=True).is_last


def mla_pool(num_layers, *, index_head_dim=None, start_layer=0):
    return MLATokenToKVPool(
        size=64, page_size=8, num_layers=num_layers, kv_lora_rank=32, qk_rope_head_dim=16,
        index_head_dim=index_head_dim, start_layer=start_layer,
    )  # fmt: skip


def test_attributes_that_were_not_set_are_absent():
    args = KVArgs(engine_rank=1)
    args.page_size = 8
    assert not hasattr(args, "kv_buf_groups")
    with pytest.raises(AttributeError, match="total_kv_layers"):
        _ = args.total_kv_layers
    assert (args.dcp_size, args.dcp_rank, args.swa_page_size) == (1, 0, None)
    assert args == KVArgs(engine_rank=1, page_size=8)
    assert args != KVArgs(engine_rank=1)


def test_the_repr_is_short():
    args = KVArgs(kv_data_ptrs=[*range(5)], state_data_ptrs=[[1, 2]], kv_item_lens=[1, 2, 3, 4])
    assert repr(args) == (
        "KVArgs(kv_data_ptrs=[0, 1, 2, 3, ... 5 in all], state_data_ptrs=[[1, 2]], "
        "kv_item_lens=[1, 2, 3, 4])"
    )


def test_draft_buffers_come_last():
    pool, draft = mla_pool(2, index_head_dim=8, start_layer=5), mla_pool(1, index_head_dim=8)
    args = KVArgs()
    fill_kv_args(args, pool, draft)
    infos = zip(pool.get_contiguous_buf_infos(), draft.get_contiguous_buf_infos(), strict=True)
    lists = [[*own, *extra] for own, extra in infos]
    assert [args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens] == lists
    # K0 K1 V0 V1 I0 I1 dK dV dI have pages of 8 tokens in bfloat16
    assert args.kv_item_lens == [512, 512, 256, 256, 128, 128, 512, 256, 128]
    assert (args.page_size, args.prefill_start_layer, args.prefill_end_layer) == (8, 5, 7)
    assert not hasattr(args, "total_kv_layers")
    fill_kv_args(args, pool, total_kv_layers=9)
    assert args.kv_data_ptrs == pool.get_contiguous_buf_infos()[0]
    assert args.total_kv_layers == 9


@pytest.mark.parametrize("index_head_dim", [None, 8])
@pytest.mark.parametrize(("layers", "drafts"), [(3, 1), (2, 1), (4, 1), (1, 3), (2, 0), (0, 1)])
def test_drafts_of_thin_stages_are_no_groups(layers, drafts, index_head_dim):
    """3 layers of 3 groups and a draft would have 4 groups if buffers were divided by layers."""
    pool = SimpleNamespace(
        index_head_dim=index_head_dim, layer_num=layers, get_state_buf_infos=lambda: ([], [], [])
    )
    draft = SimpleNamespace(layer_num=drafts) if drafts else None
    args = KVArgs(state_types=["swa"], state_data_ptrs=[[1]], kv_data_ptrs=[1])
    setup_state_kv_args(args, pool, draft, total_kv_layers=61)
    assert args.kv_buf_groups == (2 if index_head_dim is None else 3)
    assert (args.hidden_kv_layers, args.total_kv_layers) == (61, 61)
    assert args.draft_kv_layers == drafts
    assert [value for name, value in vars(args).items() if name.startswith("state_")] == [[]] * 5


def test_pools_of_the_library():
    args = KVArgs()
    setup_state_kv_args(args, mla_pool(2, index_head_dim=8), mla_pool(1), total_kv_layers=4)
    assert (args.kv_buf_groups, args.hidden_kv_layers, args.draft_kv_layers) == (3, 4, 1)
    args = KVArgs(state_types=["swa"])
    mha = MHATokenToKVPool(size=64, page_size=8, num_layers=2, num_kv_heads=2, head_dim=8)
    setup_state_kv_args(args, mha, total_kv_layers=4)
    assert args.state_types == []
    assert not hasattr(args, "kv_buf_groups")
    assert not hasattr(args, "total_kv_layers")


def test_pairs_without_ids():
    pairs, either_way = build_transfer_entry_pairs, {"allow_positional_fallback": True}
    assert pairs(None, None, 0, 5) == []
    assert pairs(None, [], 2, 2) == [(0, 0), (1, 1)]
    assert pairs(None, None, 2, 3, **either_way) == [(0, 0), (1, 1)]
    assert pairs([1, 2], None, 2, 3, **either_way)[1] == (1, 1)
    for arguments, options, message in [
        (([1, 2], None, 2, 2), {}, "both PD peers or neither, got 2 ids of the source and 0 of"),
        ((None, None, 2, 3), {}, "requires layer ids on both peers; got src=2 dst=3"),
        ((None, None, 3, 2), either_way, "requires layer ids on both peers; got src=3 dst=2"),
        (([1], [1, 2], 2, 2), {}, "src metadata=1 entries=2, dst metadata=2 entries=2"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            pairs(*arguments, **options)
    with pytest.raises(ValueError, match=r"n_src and n_dst must be in \[0, 16777216\], got -1"):
        pairs(None, None, -1, 2)


def test_start_layers_of_hybrid_models():
    for start, ids, found in (
        (31, [3, 31, 40], 1), (99, [3, 31, 40], 3), (0, [], 0), (30, range(3, 60, 4), 7)
    ):  # fmt: skip
        assert kv_start_layer(start, list(ids)) == found
    with pytest.raises(ValueError, match="kv_layer_ids must ascend, got no ascent at index 2"):
        kv_start_layer(1, [3, 5, 5])
    with pytest.raises(ValueError, match="start_layer must be >= 0, got -1"):
        kv_start_layer(-1, [3])
