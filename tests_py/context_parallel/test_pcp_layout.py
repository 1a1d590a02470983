# SPDX-License-Identifier: Apache-2.0
"""Layouts of prefill context parallelism as vLLM has them: the rule, row by row, and tensors."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpattn.context_parallel.vllm_0_32 import RankSegments, build_pcp_layout, pcp_segments
from support.examples import examples

lens = st.integers(0, 40)


@st.composite
def batches(draw):
    requests = draw(st.lists(st.tuples(lens, lens, st.booleans()), max_size=6))
    extend, prefix, prefill = ([request[i] for request in requests] for i in range(3))
    options = {
        "pcp_size": draw(st.integers(1, 5)),
        "is_prefill": draw(st.sampled_from([prefill, None])),
        "shard_decode": draw(st.booleans()),
        "dcp_size": draw(st.integers(1, 2)),
    }
    return extend, prefix, options


def rows_of(extend, prefix, pcp_size, is_prefill, shard_decode, dcp_size):
    """Return the pieces (request, tokens of the batch) of each rank, and who is on all of them."""
    base = np.cumsum([0, *extend])
    ranks = [[] for _ in range(pcp_size)]
    prefills, turn, everywhere = [[] for _ in ranks], 0, set()
    for s, length in enumerate(extend):
        tokens = np.arange(base[s], base[s + 1])
        chunk = -(-length // (2 * pcp_size))
        prefill = is_prefill[s] if is_prefill is not None else length != 1 or prefix[s] == 0
        if not prefill and shard_decode and dcp_size == 1:
            if length:
                ranks[turn % pcp_size].append((s, tokens))
                turn += 1
            continue
        if not prefill or (dcp_size > 1 and (2 * pcp_size - 1) * chunk >= length):
            everywhere.add(s)
            for rank in prefills if prefill else ranks:
                rank.append((s, tokens))
            continue
        for rank, rest in enumerate(prefills):
            rest += [(s, tokens[i * chunk : (i + 1) * chunk])
                     for i in (rank, 2 * pcp_size - 1 - rank)]  # fmt: skip
    rows = [
        [(s, tokens) for s, tokens in rank + rest if len(tokens)]
        for rank, rest in zip(ranks, prefills, strict=True)
    ]
    return rows, everywhere


@given(batches(), st.integers(0, 5))
@settings(max_examples=examples(300))
def test_layouts_are_those_of_the_rule(batch, padding):
    extend, prefix, options = batch
    expected, everywhere = rows_of(extend, prefix, **options)
    segments = pcp_segments(extend, prefix, **options)
    for rank, pieces in zip(segments, expected, strict=True):
        assert isinstance(rank, RankSegments)
        assert {column.dtype for column in rank} == {np.dtype(np.int64)}
        ends = np.cumsum([0, *(len(tokens) for _, tokens in pieces)])
        wanted = [
            (s, tokens[0], tokens[-1] + 1, begin, begin + len(tokens))
            for (s, tokens), begin in zip(pieces, ends, strict=False)
        ]
        assert list(zip(*rank, strict=True)) == wanted
    check_padding(extend, prefix, options, padding, expected, everywhere)


def check_padding(extend, prefix, options, padding, expected, everywhere):
    """The way to padded rows and back, with more of them than are needed."""
    counts = [sum(len(tokens) for _, tokens in pieces) for pieces in expected]
    padded = max(counts) + padding
    layout = build_pcp_layout(extend, prefix, padded_num_tokens=padded, **options)
    assert layout.per_rank_num_tokens == counts
    assert set(np.flatnonzero(layout.replicated * np.array(extend, bool))) == {
        s for s in everywhere if extend[s]
    }
    gathered = np.full((options["pcp_size"], padded), -1)
    for row, pieces in zip(gathered, expected, strict=True):
        tokens = np.concatenate([np.zeros(0, int), *(tokens for _, tokens in pieces)])
        row[: len(tokens)] = tokens
    gathered = gathered.reshape(-1)
    assert np.array_equal(layout.padded_gather_idx, np.maximum(gathered, 0))
    first = [np.flatnonzero(gathered == token)[0] for token in range(sum(extend))]
    assert np.array_equal(layout.hidden_restore_idx, np.array(first, int))
    written = np.flatnonzero(layout.gathered_kv_write_mask)
    assert np.array_equal(written, np.sort(np.array(first, int)))
    tokens = np.arange(sum(extend)) * 3 + 1
    parts = [layout.shard(tokens, rank) for rank in range(options["pcp_size"])]
    assert np.array_equal(np.concatenate(parts), np.where(gathered < 0, 0, gathered * 3 + 1))
    assert np.array_equal(layout.unshard(parts), tokens)
    base = np.cumsum([0, *extend])
    for keys, pieces in zip(layout.seq_lens, expected, strict=True):
        assert keys.tolist() == [prefix[s] + t[-1] + 1 - base[s] for s, t in pieces]
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pcp_size": 0}, r"pcp_size must be in \[1, 32768\], got 0"),
    ],
)
def test_batches_that_are_refused(change, message):
    arguments = {"extend_lens": [7, 1], "prefix_lens": [0, 5], "pcp_size": 2} | change
    for function in (pcp_segments, build_pcp_layout):
        with pytest.raises(ValueError, match=rf"^{function.__name__}: {message}"):
            function(**arguments)


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
