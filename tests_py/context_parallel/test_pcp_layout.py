# SPDX-License-Identifier: Apache-2.0
"""A layout of prefill context parallelism in vLLM has the right rows, also as tensors.

`tests_cpp/context_parallel/pcp_layout_test.cc` tests the rule, and the linter proves any batch.
"""

import pickle

import numpy as np
import pytest

from cpattn.context_parallel.vllm_0_32 import RankSegments, build_pcp_layout, pcp_segments


def test_a_layout_and_the_way_to_its_rows_and_back():
    """The batch has a prefill of five tokens in chunks of two, then a decode of rank 0, padded."""
    extend, prefix = [5, 1], [3, 4]
    segments = pcp_segments(extend, prefix, pcp_size=2)
    assert all(isinstance(rank, RankSegments) for rank in segments)
    assert {column.dtype for rank in segments for column in rank} == {np.dtype(np.int64)}
    assert [list(zip(*rank, strict=True)) for rank in segments] == [
        [(1, 5, 6, 0, 1), (0, 0, 2, 1, 3)],
        [(0, 2, 4, 0, 2), (0, 4, 5, 2, 3)],
    ]
    layout = build_pcp_layout(extend, prefix, pcp_size=2, padded_num_tokens=4)
    assert layout.per_rank_num_tokens == [3, 3]
    assert [keys.tolist() for keys in layout.seq_lens] == [[5, 5], [7, 8]]
    assert layout.padded_gather_idx.tolist() == [5, 0, 1, 0, 2, 3, 4, 0]
    assert layout.hidden_restore_idx.tolist() == [1, 2, 4, 5, 6, 0]
    assert layout.gathered_kv_write_mask.tolist() == [True, True, True, False] * 2
    assert not layout.replicated.any()
    tokens = np.arange(6) * 3 + 1
    parts = [layout.shard(tokens, rank) for rank in range(2)]
    assert [part.tolist() for part in parts] == [[16, 1, 4, 0], [7, 10, 13, 0]]
    assert np.array_equal(layout.unshard(parts), tokens)
    again = pickle.loads(pickle.dumps(layout))
    assert again == layout
    assert again.segments[0].request.tolist() == layout.segments[0].request.tolist()


def test_rows_of_two_dimensions_in_either_container():
    torch = pytest.importorskip("torch")
    layout = build_pcp_layout([5, 1], [0, 3], pcp_size=2)
    hidden = torch.arange(18.0).reshape(3, 6)
    parts = [layout.shard(hidden, rank, dim=1) for rank in range(2)]
    assert torch.equal(layout.unshard(parts, dim=-1), hidden)
    assert parts[0].shape == (3, 3)


def test_any_byte_but_0_is_true():
    flags = np.array([2, 0], np.uint8).view(bool)
    layouts = [
        build_pcp_layout([7, 1], [0, 5], pcp_size=2, is_prefill=f) for f in (flags, [True, False])
    ]
    assert layouts[0] == layouts[1]


def test_batches_that_are_refused():
    for function in (pcp_segments, build_pcp_layout):
        message = rf"^{function.__name__}: pcp_size must be in \[1, 32768\], got 0"
        with pytest.raises(ValueError, match=message):
            function([7, 1], [0, 5], pcp_size=0)


def test_tensors_that_are_refused():
    layout = build_pcp_layout([7, 1], [0, 5], pcp_size=2)
    with pytest.raises(ValueError, match=r"^shard: pcp_rank must be in \[0, 2\), got 2"):
        layout.shard(np.arange(8), 2)
    with pytest.raises(ValueError, match=r"^shard: x must have num_tokens = 8 rows"):
        layout.shard(np.arange(7), 0)
    with pytest.raises(ValueError, match=r"^unshard: parts must hold pcp_size = 2"):
        layout.unshard([np.arange(4)])
    with pytest.raises(ValueError, match=r"rank 1 must have 1 dimensions and at least 4 rows"):
        layout.unshard([np.arange(4), np.arange(3)])
