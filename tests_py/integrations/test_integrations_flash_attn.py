# SPDX-License-Identifier: Apache-2.0
"""Functions of flash-attn agree with the oracle, on numbers and on 8-bit codes."""

import itertools
import math

import pytest
import torch

from cpattn.integrations import flash_attn
from support.cases import DTYPES, strided_copy
from support.integrations import documented_masks
from support.integrations.documented_masks import assert_flash_attn, in_flash_attn
from support.pairwise import pairwise
from support.tolerances import assert_similar

HEADS, KV_HEADS, DIM = 4, 2, 32
WINDOWS = [(-1, -1), (5, 0), (0, 0), (4, 3), (-1, 2), (6, -1)]


@pytest.fixture(autouse=True)
def fixed_inputs():
    torch.manual_seed(0)


def normal(*shape, dtype="float32"):
    return torch.randn(shape).to(getattr(torch, dtype))


def documented_biases(alibi_slopes, q_lens, kv_lens):
    """Follow the docs of flash_attn_func: "A bias of (-alibi_slope * |i + seqlen_k - seqlen_q - j|)
    is added to the attention score of query i and key j"."""
    slopes = alibi_slopes.expand(len(q_lens), -1)[:, :, None, None]
    distances = [
        abs(torch.arange(q)[:, None] + k - q - torch.arange(k))
        for q, k in zip(q_lens, kv_lens, strict=True)
    ]
    return [-slope * distance for slope, distance in zip(slopes, distances, strict=True)]


def cumulative(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def run_varlen(q, k, v, q_lens, kv_lens, **options):
    lens = cumulative(q_lens), cumulative(kv_lens), max(q_lens), max(kv_lens)
    options["return_attn_probs"] = True
    out, lse, _ = flash_attn.flash_attn_varlen_func(q, k, v, *lens, **options)
    return out, lse


@pytest.mark.parametrize(
    ("lens", "window_size", "causal"), pairwise([(7, 7), (3, 11), (11, 3)], WINDOWS, [False, True])
)
def test_equal_lengths(lens, window_size, causal):
    q_len, kv_len = lens
    q = normal(2, q_len, HEADS, DIM)
    k, v = normal(2, kv_len, KV_HEADS, DIM), normal(2, kv_len, KV_HEADS, DIM)
    options = {"causal": causal, "window_size": torch.tensor(window_size)}  # its tests use this
    sinks, slopes = normal(HEADS), normal(2, HEADS)
    asked = {**options, "s_aux": sinks, "alibi_slopes": slopes, "return_attn_probs": True}
    out, lse, probabilities = flash_attn.flash_attn_func(q, k, v, **asked)
    assert out.shape == q.shape
    assert lse.shape == (2, HEADS, q_len)
    assert probabilities.numel() == 0
    rows = (x.flatten(0, 1) for x in (q, k, v))
    inputs = in_flash_attn(*rows, [q_len] * 2, [kv_len] * 2, sinks=sinks, **options)
    inputs["bias"] = documented_biases(slopes, [q_len] * 2, [kv_len] * 2)
    assert_flash_attn(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), inputs)


# Query i of 3 stands at key i + 2 of 5.
BY_HAND = [
    *((False, (1, 1), "01110 00111 00011"), (False, (2, 0), "11100 01110 00111")),
    *((False, (0, 1), "00110 00011 00001"), (False, (-1, 1), "11110 11111 11111")),
    *((False, (0, -1), "00111 00011 00001"), (True, (1, 1), "01100 00110 00011")),
    (True, (-1, -1), "11100 11110 11111"),
]


@pytest.mark.parametrize(("causal", "window_size", "rows"), BY_HAND)
def test_windows_by_hand(causal, window_size, rows):
    """Other tests judge the functions by the documented mask."""
    mask = documented_masks.mask_of(documented_masks.flash_attn, [3], [5], causal, window_size)
    assert "".join(str(int(x)) for x in mask) == rows.replace(" ", "")


RAGGED = [
    *(((5, 3, 1), (5, 3, 1)), ((3, 70), (40, 1))),
    ((4, 0, 6, 2), (9, 3, 0, 33)),  # a sequence without new tokens, one without keys
    ((0, 9, 4), (0, 2, 0)),  # fewer keys than queries, the last sequence without keys
]


@pytest.mark.parametrize(
    ("lens", "window_size", "causal", "dtype", "slopes"),
    pairwise(RAGGED, WINDOWS, [False, True], DTYPES, ["none", "of heads", "of sequences"]),
)
def test_ragged(lens, window_size, causal, dtype, slopes):
    q_lens, kv_lens = lens
    q = strided_copy(normal(sum(q_lens), HEADS, DIM, dtype=dtype))
    k, v = (strided_copy(normal(sum(kv_lens), KV_HEADS, DIM, dtype=dtype)) for _ in "kv")
    options = {"causal": causal, "window_size": window_size, "softcap": 3.0}
    asked = {"softmax_scale": 0.5, "s_aux": normal(HEADS, dtype=dtype)}
    expected = {"scale": 0.5, "sinks": asked["s_aux"].float()}
    if slopes != "none":
        asked["alibi_slopes"] = normal(*([len(q_lens)] if slopes == "of sequences" else []), HEADS)
        expected["bias"] = documented_biases(asked["alibi_slopes"], q_lens, kv_lens)
    out, lse = run_varlen(q, k, v, q_lens, kv_lens, **asked, **options)
    assert_flash_attn(out, lse, in_flash_attn(q, k, v, q_lens, kv_lens, **expected, **options))


def test_keys_of_no_sequence_are_not_read():
    q, k, v = normal(4, HEADS, DIM), normal(15, KV_HEADS, DIM), normal(15, KV_HEADS, DIM)
    k[11:], v[11:] = torch.nan, torch.nan
    out, lse = run_varlen(q, k, v, (1, 3), (4, 7), causal=True)
    assert_flash_attn(out, lse, in_flash_attn(q, k, v, (1, 3), (4, 7), causal=True))
    q, k = normal(3, HEADS, DIM), normal(0, KV_HEADS, DIM)  # no keys at all
    for out, lse in (
        run_varlen(q, k, k, (1, 2), (0, 0), causal=True),
        flash_attn.flash_attn_func(q[None], k[None], k[None], return_attn_probs=True)[:2],
    ):
        assert torch.all(out == 0)
        assert torch.all(lse == torch.inf)
    out, lse = run_varlen(q[:0], k, k, (0,), (0,))
    assert out.shape == (0, HEADS, DIM)
    assert lse.shape == (HEADS, 0)


def test_one_length_for_all():
    q, k, v = (normal(2, n, KV_HEADS, DIM) for n in (1, 6, 6))
    part = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=4)
    assert_similar(part, flash_attn.flash_attn_func(q, k[:, :4], v[:, :4]))


def in_shuffled_pages(x, kv_lens, page_size):
    counts = [-(-n // page_size) for n in kv_lens]
    order = torch.randperm(sum(counts) + 1)
    pages = torch.full((len(order), page_size, *x.shape[1:]), torch.nan, dtype=x.dtype)
    table = torch.full((len(kv_lens), max(counts)), -1, dtype=torch.int32)
    for row, part in enumerate(x.split(kv_lens)):
        mine, order = order[: counts[row]], order[counts[row] :]
        table[row, : len(mine)] = mine
        for i, block in enumerate(part.split(page_size)):
            pages[mine[i], : len(block)] = block
    return pages, table


def test_block_table():
    q_lens, kv_lens = (2, 5, 1), (9, 5, 17)
    q, k, v = normal(8, HEADS, DIM), normal(31, KV_HEADS, DIM), normal(31, KV_HEADS, DIM)
    torch.manual_seed(1)
    k_pages, table = in_shuffled_pages(k, kv_lens, 4)
    torch.manual_seed(1)
    v_pages, _ = in_shuffled_pages(v, kv_lens, 4)
    out, lse = run_varlen(q, k_pages, v_pages, q_lens, kv_lens, causal=True, block_table=table)
    assert_flash_attn(out, lse, in_flash_attn(q, k, v, q_lens, kv_lens, causal=True))

    q, sinks = normal(3, 2, HEADS, DIM), normal(HEADS)
    options = {"cache_seqlens": torch.tensor(kv_lens), "block_table": table, "causal": True}
    inputs = in_flash_attn(q.flatten(0, 1), k, v, (2, 2, 2), kv_lens, causal=True, sinks=sinks)
    options |= {"s_aux": sinks, "return_softmax_lse": True}
    for splits in (0, 1):
        caches = (q, k_pages, v_pages)
        out, lse = flash_attn.flash_attn_with_kvcache(*caches, num_splits=splits, **options)
        assert_flash_attn(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), inputs)


def test_private_forms_agree_with_the_public_ones():
    q, k, v = (normal(2, 6, KV_HEADS, DIM) for _ in "qkv")
    slopes, options = normal(2, KV_HEADS), {"causal": True, "window_size": (2, -1)}
    options |= {"alibi_slopes": slopes, "return_attn_probs": True}
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, **options)
    mine = flash_attn._flash_attn_forward(q, k, v, 0.0, None, True, 2, -1, 0.0, slopes, False)
    assert len(mine) == 4
    assert torch.equal(mine[0], out)
    assert torch.equal(mine[1], lse)
    rows, ends = [x.flatten(0, 1) for x in (q, k, v)], cumulative([6, 6])
    used = {"seqused_k": torch.tensor([4, 0]), "alibi_slopes": slopes}
    mine = flash_attn._flash_attn_varlen_forward(*rows, ends, ends, 6, 6, 0.0, 0.3, False, **used)
    options = {"softmax_scale": 0.3, "alibi_slopes": slopes[:1]}
    out = flash_attn.flash_attn_func(q[:1], k[:1, :4], v[:1, :4], **options)
    assert_similar(mine[0][:6], out[0])
    assert torch.all(mine[0][6:] == 0)
    assert torch.all(mine[1][:, 6:] == torch.inf)
    with pytest.raises(NotImplementedError, match="no backward pass"):
        flash_attn._flash_attn_varlen_backward(q)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dropout_p": 0.1}, "dropout_p must be 0"),
        ({"alibi_slopes": torch.zeros(2, HEADS)}, r"alibi_slopes must be .*, heads\] = \[1, 4\]"),
        ({"q": normal(8)}, r"q must be \[tokens, heads, dim\], got shape \[8\]"),
        ({"k": normal(8)}, r"k must be \[tokens, kv_heads, dim\], got shape \[8\]"),
        ({"v": normal(8, DIM)}, r"v must be \[tokens, kv_heads, dim\], got shape \[8, 32\]"),
        ({"block_table": [[0]]}, r"k must be \[num_pages, page_size, kv_heads, dim\], got shape"),
        ({"window_size": None}, "window_size must be a sequence, got NoneType"),
        ({"window_size": (1, 2, 3)}, r"window_size must be a pair \(left, right\), got 3 values"),
        ({"window_size": (math.nan, 0)}, "window_size must be an integer, got float"),
        ({"cu_seqlens_q": [0, 9]}, "cu_seqlens_q must end within the 8 rows"),
        ({"cu_seqlens_k": [0, 5, 4, 8]}, "cu_seqlens_k must start at 0 and not decrease"),
        ({"cu_seqlens_k": [0, 4, 8]}, "must have one length, got 2 and 3"),
        ({"q": torch.zeros(8, HEADS, DIM, requires_grad=True)}, "no backward pass"),
    ],
)
def test_what_is_refused(change, message):
    rows = {
        "q": normal(8, HEADS, DIM),
        "k": normal(8, KV_HEADS, DIM),
        "v": normal(8, KV_HEADS, DIM),
    }
    lens = {"cu_seqlens_q": [0, 8], "cu_seqlens_k": [0, 8], "max_seqlen_q": 8, "max_seqlen_k": 8}
    error = TypeError if " got NoneType" in message or " got float" in message else ValueError
    with pytest.raises(error, match=f"flash_attn_varlen_func: .*{message}"):
        flash_attn.flash_attn_varlen_func(**rows | lens | change)


def test_a_forward_pass_alone_may_have_inputs_that_require_gradients():
    q = normal(1, 2, HEADS, DIM).requires_grad_()
    with torch.no_grad():
        out = flash_attn.flash_attn_func(q, q, q)
    assert torch.equal(out, flash_attn.flash_attn_func(*[q.detach()] * 3))
    with pytest.raises(TypeError, match="flash_attn_func: q must be a torch tensor, got ndarray"):
        flash_attn.flash_attn_func(*[q.detach().numpy()] * 3)


DESCALES = {
    "number": 0.02,
    "one": torch.tensor([0.02]),
    "heads": torch.tensor([0.02, 0.03]),
    "the same in all sequences": torch.tensor([[0.02, 0.03]]).expand(3, 2),
    "of sequences": torch.tensor([[0.02, 0.03], [0.01, 0.04], [0.05, 0.02]]),
}


def coded(*shape, dtype=torch.int8):
    return torch.randint(-90, 90, shape).to(dtype)


def by_sequence(descale, lengths):
    """Return the factor of each row of keys: [rows, kv_heads or 1, 1]."""
    descale = torch.as_tensor(descale).double()
    descale = descale.reshape(1) if descale.ndim == 0 else descale
    heads = descale if descale.ndim == 2 else descale.expand(len(lengths), -1)
    return heads.repeat_interleave(torch.tensor(lengths), 0)[..., None]


@pytest.mark.parametrize("kinds", list(itertools.pairwise([*DESCALES, "number"])))
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_ragged_codes(dtype, kinds):
    q_lens, kv_lens, descales = [5, 2, 3], [9, 12, 3], [DESCALES[kind] for kind in kinds]
    q = normal(10, HEADS, DIM)
    k, v = coded(24, KV_HEADS, DIM, dtype=dtype), coded(24, KV_HEADS, DIM, dtype=dtype)
    options = {"causal": True, "k_descale": descales[0], "v_descale": descales[1]}
    slopes = normal(3, HEADS)  # separate slopes for each sequence, like its factors
    out, lse = run_varlen(q, k, v, q_lens, kv_lens, alibi_slopes=slopes, **options)
    factors = (by_sequence(descale, kv_lens) for descale in descales)
    k, v = (x.double() * factor for x, factor in zip((k, v), factors, strict=True))
    biases = documented_biases(slopes, q_lens, kv_lens)
    assert_flash_attn(out, lse, in_flash_attn(q, k, v, q_lens, kv_lens, True, bias=biases))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_codes_are_appended_to_a_cache_of_codes(dtype):
    q, (k_cache, v_cache) = normal(2, 1, HEADS, DIM), coded(2, 2, 8, KV_HEADS, DIM, dtype=dtype)
    k, v = coded(2, 2, 1, KV_HEADS, DIM, dtype=dtype)
    options = {"k_descale": 0.02, "v_descale": torch.tensor([0.01, 0.03]), "causal": True}
    caches, lens = (q, k_cache, v_cache), torch.tensor([3, 7])
    out = flash_attn.flash_attn_with_kvcache(*caches, k, v, cache_seqlens=lens, **options)
    for sequence, length in enumerate((4, 8)):
        assert torch.equal(k_cache[sequence, length - 1].float(), k[sequence, 0].float())
        expected = flash_attn.flash_attn_func(
            q[sequence][None], *(x[sequence, :length][None] for x in (k_cache, v_cache)), **options
        )
        assert_similar(out[sequence], expected[0])
    with pytest.raises(ValueError, match=r"k must be torch\.\w+ as the cache is"):
        flash_attn.flash_attn_with_kvcache(*caches, k.float(), v, cache_seqlens=3, **options)


def test_descales_that_do_not_fit():
    q, k, v = normal(2, 4, HEADS, DIM), *coded(2, 2, 6, KV_HEADS, DIM)
    with pytest.raises(ValueError, match=r"v_descale must be \[batch, kv_heads\] = \[2, 2\], got"):
        flash_attn.flash_attn_func(q, k, v, k_descale=1.0, v_descale=torch.ones(2, 4))
    with pytest.raises(ValueError, match="k_scale must be a positive number, got 0"):
        flash_attn.flash_attn_func(q, k, v, k_descale=0.0, v_descale=1.0)
