# SPDX-License-Identifier: Apache-2.0
"""Cases that a signature can express: all edges, and more by Hypothesis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hypothesis import strategies as st

from .cases import Case, Features

_LENGTHS = (0, 1, 2, 3, 5, 8, 63, 64, 65, 127, 128, 129)
_LONG = 1500
_CHUNK, _PREFIX = 130, 140  # new and cached tokens: more than usual tiles of 128
_CAPS = (1.0, 3.0, 30.0)
_HEADS = ((1, 1), (2, 2), (4, 2), (4, 1), (6, 2), (6, 3))


def edge_cases(features: Features) -> Iterator[Case]:
    """Return a case for each thing that can go wrong alone, small ones first."""
    layout, page = features.layouts[0], features.page_sizes[0]
    start = Case(
        layout=layout, page_size=page, causal=features.causal[0], dtype=features.dtypes[0],
        kv_layout=features.kv_layouts[0], head_dim=features.head_dims[0],
        v_head_dim=features.head_dims[0],
    )  # fmt: skip
    one = (3,) if features.same_q_lens else (3, 2)
    ragged = (3, 3, 3) if features.same_q_lens else (5, 1, 3)
    plain = prefix = replace(start, q_lens=one, kv_lens=one)
    batch = replace(start, q_lens=ragged, kv_lens=ragged, num_heads=2, num_kv_heads=2)
    if features.prefix:
        prefix = replace(plain, kv_lens=tuple(q + n for q, n in zip(one, (9, 4), strict=False)))
        batch = replace(batch, kv_lens=(8, 14, 21))
    groups = replace(batch, num_heads=4 if features.groups else 2)
    square = replace(batch, q_lens=(5, 5), kv_lens=(5, 5))  # needs no mask, or only a causal one
    one_empty = (0, *batch.kv_lens[1:])
    not_causal = False in features.causal
    narrow = features.head_dims[-2:][0]  # narrower than the last, if possible
    changes: tuple[tuple[bool, Case, dict[str, object]], ...] = (
        (True, plain, {}),
        (features.prefix, prefix, {}),
        (not_causal, prefix, {"causal": False}),
        (True, batch, {}),
        (True, groups, {}),
        (True, groups, {"scale": 0.5}),
        (True, square, {}),
        (not_causal, square, {"causal": False}),
        (features.window, batch, {"window": 0}),
        (features.window, batch, {"window": 3}),
        (
            features.window and features.window_without_causal and not_causal, batch,
            {"window": 3, "causal": False},
        ),
        (
            features.window and features.window_right and not_causal, batch,
            {"window": 3, "window_right": 2, "causal": False},
        ),
        (
            features.window and features.window_right and not_causal, batch,
            {"window_right": 1, "causal": False},
        ),
        (features.alibi, batch, {"alibi": True}),
        (features.alibi and not_causal, batch, {"alibi": True, "causal": False}),
        (features.softcap, batch, {"softcap": 1.0, "scale": 0.5}),
        (features.sinks, batch, {"sinks": True}),
        (features.sinks, plain, {"sinks": True}),
        (features.v_head_dim, batch, {"v_head_dim": narrow}),
        (features.v_head_dim, batch, {"head_dim": narrow, "scale": 0.125}),
        (features.pad_rows, batch, {"pad_rows": 3}),
        (features.pad_rows, batch, {"pad_rows": 3, "poison": features.poison}),
        (features.poison, batch, {"poison": True}),
        (features.poison, batch, {"poison": True, "causal": features.causal[-1]}),
        (features.append, batch, {"append": True}),
        (
            features.empty and features.short_kv, plain,
            {"q_lens": (9, 4)[: len(one)], "kv_lens": (6, 2)[: len(one)]},
        ),
        (features.empty and not_causal, batch, {"kv_lens": one_empty, "causal": False}),
        (features.empty and features.short_kv, batch, {"kv_lens": one_empty}),
    )  # fmt: skip
    yield from (replace(case, **change) for say, case, change in changes if say)  # type: ignore[arg-type]
    yield from _by_memory(features, batch)
    yield from _long(features, start)


def _by_memory(features: Features, batch: Case) -> Iterator[Case]:
    """Return each layout, page size and dtype, and lengths around a page."""
    for layout in features.layouts[1:]:
        yield replace(batch, layout=layout)
        yield replace(batch, layout=layout, poison=features.poison)
    if "paged" in features.layouts:
        for kv_layout in features.kv_layouts[1:]:
            yield replace(batch, kv_layout=kv_layout, layout="paged")
        for size in features.page_sizes:
            lens = (size + 1, 2 * size, max(3 * size - 1, 3))
            q_lens = (1, 1, 1)
            if not features.prefix:
                q_lens = lens = (size + 1,) * 3 if features.same_q_lens else lens
            case = replace(batch, layout="paged", page_size=size, q_lens=q_lens, kv_lens=lens)
            yield case
            yield replace(case, causal=features.causal[-1], poison=features.poison)
    for dtype in features.dtypes[1:]:
        yield replace(batch, dtype=dtype)


def _long(features: Features, start: Case) -> Iterator[Case]:
    """Return cases with many rows after many keys, one decisive key or equal ones, or far pages."""
    behind = _PREFIX if features.prefix else 0
    chunk = replace(start, q_lens=(_CHUNK,), kv_lens=(_CHUNK + behind,))
    yield chunk
    if features.window:
        yield replace(chunk, window=_CHUNK)
    long = replace(start, q_lens=(1,), kv_lens=(_LONG,), page_size=max(features.page_sizes))
    for dtype in features.dtypes if features.prefix else ():
        case = replace(long, dtype=dtype)
        yield replace(case, values="even")
        yield replace(case, values="one_hot", head_dim=64, v_head_dim=64)
    if features.far and "paged" in features.layouts:
        q_lens, size = (3,) if features.prefix else (21,), min(features.page_sizes)
        near = replace(start, q_lens=q_lens, kv_lens=(21,), layout="paged", page_size=size)
        wide = replace(
            near, num_heads=2, num_kv_heads=2, scale=0.125, dtype="bfloat16", page_size=16,
            head_dim=64, v_head_dim=64,
        )  # fmt: skip
        for case, far in ((near, 16), (wide, 31)):
            if case.dtype in features.dtypes:
                yield case
                yield replace(case, far=far)


@st.composite
def cases(draw: st.DrawFn, features: Features, like: Case | None = None) -> Case:
    """Draw any case that a signature can express; Hypothesis shrinks towards the first choices.

    With `like`, prefixes may be as long as the sequences of that case.
    """
    layout = draw(st.sampled_from(features.layouts))
    page_size = draw(st.sampled_from(features.page_sizes)) if layout == "paged" else 4
    causal = draw(st.sampled_from(features.causal))
    long = () if like is None else like.kv_lens
    q_lens, kv_lens = draw(_lengths(features, page_size, causal, long))
    usual = [pair for pair in _HEADS if features.groups or pair[0] == pair[1]]
    heads, kv_heads = draw(st.sampled_from(usual))
    dim = draw(st.sampled_from(features.head_dims))
    windowed = features.window and (causal or features.window_without_causal)
    windows = st.one_of(st.none(), st.sampled_from((0, 1, 3, 16, 64))) if windowed else st.none()
    right, alibi = None, features.alibi and draw(st.booleans())
    if features.window and features.window_right and not causal:
        right = draw(st.sampled_from((None, 0, 1, 16)))
        windows = (
            st.one_of(st.none(), st.sampled_from((0, 3, 64))) if right is not None else windows
        )
    append = features.append and all(q <= kv for q, kv in zip(q_lens, kv_lens, strict=True))
    softcap = draw(st.sampled_from((0.0, *_CAPS))) if features.softcap else 0.0
    one_hot = softcap == 0 and not alibi and draw(st.sampled_from((False, False, False, True)))
    dim = 64 if one_hot else dim
    return Case(
        q_lens, kv_lens, heads, kv_heads, dim,
        draw(st.sampled_from(features.head_dims)) if features.v_head_dim else dim,
        draw(st.sampled_from(features.dtypes)), layout,
        draw(st.sampled_from(features.kv_layouts)), page_size, causal, draw(windows), right,
        alibi, softcap,
        features.sinks and draw(st.booleans()),
        dim**-0.5 * draw(st.sampled_from((1.0, 0.5, 2.0))),
        "one_hot" if one_hot else "normal",
        draw(st.sampled_from((0, 1, 5))) if features.pad_rows else 0, 0,
        append and draw(st.booleans()),
        features.poison and draw(st.booleans()),
        draw(st.integers(0, 999)),
    )  # fmt: skip


@st.composite
def _lengths(
    draw: st.DrawFn, features: Features, page_size: int, causal: bool, long: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    edges = sorted({*_LENGTHS, page_size - 1, page_size, page_size + 1, 2 * page_size})
    length, prefix = st.sampled_from(edges), st.sampled_from(sorted({*edges, *long}))
    count = draw(st.integers(1, 4))
    if features.same_q_lens:
        q_lens = [draw(length.filter(lambda x: 0 < x <= 65))] * count
    else:
        q_lens = draw(st.lists(length, min_size=count, max_size=count))
    kv_lens = []
    for q_len in q_lens:
        kv_len = q_len + draw(prefix) if features.prefix else q_len
        shorter = features.short_kv if causal else features.empty
        if shorter and draw(st.sampled_from((False, False, False, True))):
            kv_len = draw(length)
        kv_lens.append(kv_len if features.prefix else min(q_len, kv_len))
    if not features.empty:
        pairs = [(q, kv) for q, kv in zip(q_lens, kv_lens, strict=True) if 0 < q <= kv] or [(1, 1)]
        q_lens, kv_lens = map(list, zip(*pairs, strict=True))
    if sum(q_lens) == 0:
        q_lens[0], kv_lens[0] = 1, max(1, kv_lens[0])
    if max(kv_lens) == 0:
        i = q_lens.index(max(q_lens))
        kv_lens[i] = q_lens[i]
    return tuple(q_lens), tuple(kv_lens)
