# SPDX-License-Identifier: Apache-2.0
"""flash_attn_with_kvcache agrees with the oracle for rotary tables and padding on the left."""

import pytest
import torch

from cpattn.integrations import flash_attn
from support.integrations.documented_masks import assert_flash_attn, in_flash_attn
from support.pairwise import pairwise
from support.tolerances import assert_similar

HEADS, KV_HEADS, DIM, CAPACITY = 4, 2, 32, 12
LENGTHS, LEFTPAD, POSITIONS = [3, 0, 7], [2, 0, 5], 16


@pytest.fixture(autouse=True)
def fixed_inputs():
    torch.manual_seed(0)


def turned(x, angles, positions, interleaved):
    """Rotate pairs of the first elements of x [tokens, heads, dim] as complex numbers."""
    half = angles.shape[1]
    turn = torch.exp(1j * angles[positions].double())[:, None]
    x = x.double().clone()
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if interleaved
        else (slice(half), slice(half, 2 * half))
    )
    pairs = torch.complex(x[..., first], x[..., second]) * turn
    x[..., first], x[..., second] = pairs.real, pairs.imag
    return x.float()


def caches(layout):
    """Return keys and values as views of one memory in a layout."""
    shape = {"apart": (2, 3, CAPACITY), "beside": (3, 2, CAPACITY), "within": (3, CAPACITY, 2)}
    memory = torch.randn(*shape[layout], KV_HEADS, DIM)
    return memory.unbind({"apart": 0, "beside": 1, "within": 2}[layout])


@pytest.mark.parametrize(
    ("layout", "padded", "rotary_dim", "interleaved", "causal", "window_size", "new"),
    pairwise(
        ["apart", "beside", "within", "pages"],
        [False, True],
        [0, 16, DIM],
        [False, True],
        [False, True],
        [(-1, -1), (4, 1)],
        [1, 3],
    ),
)
def test_a_step(layout, padded, rotary_dim, interleaved, causal, window_size, new):
    tokens = 2
    q, k, v = (torch.randn(3, n, h, DIM) for n, h in ((tokens, HEADS), *[(new, KV_HEADS)] * 2))
    k_cache, v_cache = caches("apart" if layout == "pages" else layout)
    before = k_cache.clone(), v_cache.clone()
    options = {"causal": causal, "window_size": window_size}
    where = {"cache_seqlens": torch.tensor(LENGTHS).int(), "return_softmax_lse": True}
    padding = LEFTPAD if padded and layout != "pages" else [0] * 3
    given, rows = [k_cache, v_cache], [1, 2, 0]
    if layout == "pages":
        given = [x.view(6, 6, KV_HEADS, DIM) for x in given]
        where["block_table"] = torch.tensor([[2 * row, 2 * row + 1] for row in rows])
    else:
        where["cache_batch_idx"] = torch.tensor(rows)
        if padded:
            where["cache_leftpad"] = torch.tensor(padding).int()
            for row, n in zip(rows, padding, strict=True):
                k_cache[row, :n] = v_cache[row, :n] = torch.nan
    angles = torch.rand(POSITIONS, rotary_dim // 2) * 6
    if rotary_dim:
        where |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
        where["rotary_interleaved"] = interleaved
    out, lse = flash_attn.flash_attn_with_kvcache(q, *given, k, v, **where, **options)

    kept = [x.clone() for x in before]
    keys, values, queries = [], [], []
    for s, (row, n, pad) in enumerate(zip(rows, LENGTHS, padding, strict=True)):
        at = torch.arange(n, n + new)
        kept[0][row, at], kept[1][row, at] = turned(k[s], angles, at, interleaved), v[s]
        # flash-attn's docstring puts all at cache_seqlens "if not causal and not local".
        steps = torch.arange(tokens) * (causal or window_size != (-1, -1))
        queries.append(turned(q[s], angles, n + steps, interleaved))
        keys.append(kept[0][row, pad : n + new])
        values.append(kept[1][row, pad : n + new])
        assert_similar(k_cache[row, at], kept[0][row, at])
        assert torch.equal(v_cache[row, at], kept[1][row, at])
        untouched = torch.ones(CAPACITY).bool()
        untouched[at], untouched[:pad] = False, False
        assert torch.equal(k_cache[row, untouched], before[0][row, untouched])
        assert torch.equal(v_cache[row, untouched], before[1][row, untouched])
    kv_lens = [len(x) for x in keys]
    rows = map(torch.cat, (queries, keys, values))
    inputs = in_flash_attn(*rows, [tokens] * 3, kv_lens, **options)
    assert_flash_attn(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), inputs)


def test_padding_of_a_cache_that_nothing_is_written_into():
    q, (k, v) = torch.randn(3, 2, HEADS, DIM), caches("apart")
    leftpad = [5, CAPACITY, 0]
    options = {"cache_leftpad": torch.tensor(leftpad), "causal": True, "return_softmax_lse": True}
    slopes = {"alibi_slopes": torch.rand(3, HEADS)}
    out, lse = flash_attn.flash_attn_with_kvcache(q, k, v, **options, **slopes)
    assert not out[1].any()
    assert torch.isposinf(lse[1]).all()
    for s in (0, 2):
        keys, values = (x[s : s + 1, leftpad[s] :] for x in (k, v))
        own = {"alibi_slopes": slopes["alibi_slopes"][s]}
        expected = flash_attn.flash_attn_func(q[s : s + 1], keys, values, causal=True, **own)
        assert_similar(out[s], expected[0])


def test_leftpad_of_ragged_sequences():
    q, (k, v) = torch.randn(6, HEADS, DIM), torch.randn(2, 15, KV_HEADS, DIM)
    ends = torch.tensor([0, 2, 3, 6]), torch.tensor([0, 6, 10, 15])
    arguments = q, k, v, *ends, 3, 6, 0.0, None, True
    leftpad, used = torch.tensor([2, 0, 4]), torch.tensor([5, 4, 4])
    out, lse, *_ = flash_attn._flash_attn_varlen_forward(
        *arguments, leftpad_k=leftpad, seqused_k=used
    )
    kept = torch.tensor([2, 3, 4, 6, 7, 8, 9])
    ends_k = torch.tensor([0, 3, 7, 7])
    expected = flash_attn._flash_attn_varlen_forward(
        q, k[kept], v[kept], ends[0], ends_k, 3, 6, 0.0, None, True
    )
    assert_similar(out, expected[0])
    assert torch.equal(torch.isposinf(lse), torch.isposinf(expected[1]))
    with pytest.raises(ValueError, match=r"leftpad_k must be 3 integers from 0 to the lengths"):
        flash_attn._flash_attn_varlen_forward(*arguments, leftpad_k=torch.tensor([7, 0, 0]))


TABLE = torch.ones(10, 8)
FAR_PAGES = {"block_table": torch.tensor([[9, 0], [9, 1]]), "cache_seqlens": 14}
FAR_PAGES |= dict.fromkeys(("rotary_cos", "rotary_sin"))
PADDED = {"cache_leftpad": torch.tensor([0, 1])}
BOTH = dict.fromkeys(("cache_batch_idx", "block_table"), torch.zeros(2, 1).int())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rotary_cos": None}, "rotary_cos must be numbers"),
        ({"rotary_sin": torch.ones(10)}, "rotary_sin must be numbers"),
        ({"rotary_sin": torch.ones(10, 8).int()}, r"rotary_sin must be numbers .* torch.int32"),
        ({"rotary_sin": torch.ones(10, 4)}, r"of one shape, .* \[10, 8\] and \[10, 4\]"),
        (dict.fromkeys(("rotary_cos", "rotary_sin"), torch.ones(9, 17)), "at most 16 columns"),
        ({"cache_seqlens": 8}, "rotary_cos must have 11 rows, one for each position, got 10"),
        ({"k": None, "v": None}, "rotary_cos must be given with k"),
        ({"v": torch.ones(2, 1, KV_HEADS, DIM).bfloat16()}, "v must be torch.float32 as the cache"),
        ({"alibi_slopes": torch.ones(HEADS + 1)}, "alibi_slopes must have shape"),
        ({"softcap": -1.0}, "softcap"),
        ({"k_descale": torch.ones(3, KV_HEADS)}, "k_descale must be"),
        ({"q": torch.ones(2, 3, HEADS, DIM).bfloat16()}, "k_cache must be bfloat16"),
        ({"q": torch.ones(2, 3, KV_HEADS + 1, DIM)}, "num_heads"),
        (FAR_PAGES, "page ids must be in"),
        ({"cache_leftpad": torch.zeros(2)}, "cache_leftpad must be 2 integers"),
        ({"cache_leftpad": torch.tensor([0, 6])}, r"from 0 to the lengths \[5 5\], got \[0 6\]"),
        ({"cache_leftpad": torch.tensor([-1, 0])}, r"from 0 to the lengths"),
        (PADDED | {"block_table": torch.zeros(2, 1).int()}, "not be given with block_table"),
        (PADDED | {"v_cache": torch.zeros(2, 20, 2, DIM)}, "k_cache and v_cache must have as many"),
        (PADDED | {"cache_batch_idx": torch.tensor([0, 2])}, r"must be in \[0, 2\)"),
        ({"k_cache": torch.zeros(8)}, r"k_cache must be \[num_pages, page_size, kv_heads, dim\], "),
        ({"q": torch.zeros(2, 64)}, r"q must be \[batch, tokens, heads, dim\], got shape"),
        ({"v": None}, "k and v must be given together"),
        ({"cache_seqlens": torch.tensor([1, 2, 3])}, "must be 2 numbers"),
        (dict.fromkeys("kv", torch.zeros(2, 1, 1, DIM)), "k must have shape"),
        (
            dict.fromkeys("kv", torch.zeros(2, 8, KV_HEADS, DIM)),
            "needs room for 13 tokens, the cac",
        ),
        (BOTH, "cache_batch_idx must not be given with block_table"),
    ],
)
def test_what_is_refused_has_written_nothing(change, message):
    arguments = {
        "q": torch.randn(2, 3, HEADS, DIM), "k_cache": torch.zeros(2, CAPACITY, KV_HEADS, DIM),
        "v_cache": torch.zeros(2, CAPACITY, KV_HEADS, DIM), "cache_seqlens": 5, "causal": True,
        **dict.fromkeys("kv", torch.ones(2, 1, KV_HEADS, DIM)), "rotary_cos": TABLE,
        "rotary_sin": TABLE,
    }  # fmt: skip
    with pytest.raises((ValueError, TypeError), match=message):
        flash_attn.flash_attn_with_kvcache(**arguments | change)
    assert not arguments["k_cache"].any()
    assert not arguments["v_cache"].any()
    flash_attn.flash_attn_with_kvcache(**arguments)
