# SPDX-License-Identifier: Apache-2.0
"""Calls through C give the bits of Python's calls, and errors have the same words."""

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

import cpattn
from cpattn.transfer import KVEntry, KVLayout, digest
from support.c.library import CallFailed, Given, call, load

RNG = np.random.default_rng(0)
BATCH = {
    "q_lens": [3, 1, 0],
    "kv_lens": [20, 33, 7],
    "block_tables": [[4, 0, 9], [1, 5, 3], [2, 7, 7]],
}
CSR = {
    "q_lens": [3, 1, 0], "kv_indptr": [0, 2, 5, 6], "kv_indices": [4, 0, 1, 5, 3, 2],
    "last_page_len": [4, 1, 7],
}  # fmt: skip
MASK = RNG.random(3 * 20 + 33) < 0.7


def numbers(*shape, dtype=np.float32):
    return RNG.standard_normal(shape, np.float32).astype(dtype)


def tensors(dtype=np.float32):
    return {
        "q": numbers(4, 4, 32, dtype=dtype),
        "k_cache": numbers(10, 16, 2, 32, dtype=dtype),
        "v_cache": numbers(10, 16, 2, 32, dtype=dtype),
    }


def codes(dtype, **options):
    caches = {name: numbers(10, 16, 2, 32, dtype=dtype) for name in ("k_cache", "v_cache")}
    return {**tensors(), **caches, **options}


def as_bytes(name):
    caches = {x: numbers(10, 16, 2, 32, dtype=name).view(np.uint8) for x in ("k_cache", "v_cache")}
    return {**tensors(), **caches, "kv_dtype": name}


def heads_first():
    inputs = tensors()
    caches = {x: np.ascontiguousarray(inputs[x].swapaxes(1, 2)) for x in ("k_cache", "v_cache")}
    return {**inputs, **caches, "kv_layout": "HND"}


def slots():
    inputs = tensors()
    return {**inputs, **{x: inputs[x].reshape(160, 2, 32) for x in ("k_cache", "v_cache")}}


CASES = {
    "plain": {},
    "bfloat16": tensors(ml_dtypes.bfloat16),
    "float16": tensors(np.float16),
    "first_positions": {"first_positions": [0, 40, 3]},
    "slots": {**slots(), "page_size": 16},
    "heads first": heads_first(),
    "float8": codes(ml_dtypes.float8_e4m3fn),
    "int8, scales": codes(np.int8, k_scale=0.25, v_scale=numbers(2) ** 2 + 1),
    "scales of tokens": codes(
        ml_dtypes.float8_e5m2, k_scale=numbers(10, 16, 2), v_scale=numbers(10, 16, 2)
    ),
    "bytes": as_bytes("float8_e4m3fn"),
    "scale": {"scale": 0.3},
    "not causal": {"causal": False},
    "causal of each": {"causal": [True, False, True]},
    "window": {"window": (5, None)},
    "window of two sides": {"window": (4, 2), "causal": False},
    "softcap": {"softcap": 3.0},
    "bias": {"bias": numbers(3, 4, 3, 33)},
    "bias of each": {"bias": [numbers(4, 3, 20), numbers(1, 1, 33), numbers(4, 0, 7)]},
    "alibi_slopes": {"alibi_slopes": numbers(4)},
    "relative_bias": {"relative_bias": numbers(4, 9)},
    "sinks": {"sinks": numbers(4)},
    "custom_mask": {"custom_mask": MASK, "causal": False},
    "packed_custom_mask": {
        "packed_custom_mask": np.concatenate(
            [np.packbits(x, bitorder="little") for x in (MASK[:60], MASK[60:])]
        ),
    },
    "allow_short_kv": {"kv_lens": [2, 33, 7], "allow_short_kv": True},
    "batch_invariant": {"batch_invariant": True},
    "precise": {"precise": True},
    "num_threads": {"num_threads": 1},
}  # fmt: skip
OF_BATCH = {
    "q_lens", "kv_lens", "first_positions", "block_tables", "kv_indptr", "kv_indices",
    "last_page_len", "page_size", "causal", "window", "custom_mask", "packed_custom_mask",
    "allow_short_kv", "batch_invariant", "precise", "num_threads",
}  # fmt: skip


def in_c(given, options):
    batch = {name: value for name, value in options.items() if name in OF_BATCH}
    layer = {name: value for name, value in options.items() if name not in OF_BATCH}
    if "window" in batch:
        left, right = batch.pop("window")
        batch |= {"window_left": -1 if left is None else left}
        batch |= {"window_right": -1 if right is None else right}
    if isinstance(batch.get("causal"), list):
        batch["causal_of_each"] = np.array(batch.pop("causal"))
    if isinstance(layer.get("bias"), list):
        bias = layer.pop("bias")
        layer |= {"bias_of_each": given.tensors(bias), "num_bias_of_each": len(bias)}
    return given.options("batch", **batch), given.options("layer", **layer)


def attend(options):
    given = Given()
    q, v_cache = options["q"], options["v_cache"]
    out = np.full((*q.shape[:2], v_cache.shape[-1]), 7, q.dtype)
    lse = np.full(q.shape[:2], 7, np.float32)
    try:
        call("paged_attention", *in_c(given, {**options, "out": out, "lse": lse}))
    except CallFailed:
        assert (out == 7).all()
        assert (lse == 7).all()
        raise
    return out, lse


def assert_same_bits(a, b):
    assert a.dtype == b.dtype
    assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("pages", [BATCH, CSR], ids=["tables", "csr"])
def test_paged_attention(name, pages):
    if pages is CSR and "kv_lens" in CASES[name]:
        pages = {**CSR, "kv_indptr": [0, 1, 4, 5], "kv_indices": [4, 1, 5, 3, 2]}
        pages |= {"last_page_len": [2, 1, 7]}
        options = {**tensors(), **pages, "allow_short_kv": True}
    else:
        options = {**tensors(), **pages, **CASES[name]}
    out, lse = cpattn.paged_attention(**options, return_lse=True)
    for here, there in zip(attend(options), (out, lse), strict=True):
        assert_same_bits(here, there)


def test_queries_and_keys_in_two_parts():
    inputs, rope = tensors(), 8
    whole = cpattn.paged_attention(**inputs, **BATCH, scale=0.2)
    q, k = inputs["q"], inputs["k_cache"]
    parts = {"q": q[..., :-rope], "q_rope": q[..., -rope:]}
    parts |= {"k_cache": k[..., :-rope], "k_rope": k[..., -rope:], "v_cache": inputs["v_cache"]}
    np.testing.assert_array_equal(attend({**parts, **BATCH, "scale": 0.2})[0], whole)
    del parts["q_rope"]
    with pytest.raises(CallFailed, match="q_rope and k_rope must be given together"):
        attend({**parts, **BATCH})


REFUSED = {
    "no scale of int8": codes(np.int8),
    "no kv_dtype": codes(np.uint8),
    "kv_dtype": {**codes(np.uint8), "kv_dtype": "float8"},
    "kv_dtype of numbers": {"kv_dtype": "int8", "k_scale": 1.0, "v_scale": 1.0},
    "kv_layout": {"kv_layout": "HDN"},
    "short kv": {"kv_lens": [2, 33, 7]},
    "kv_lens beside csr": CSR,
    "parts of csr": {"kv_indptr": [0, 2, 5, 6]},
    "page_size": {"page_size": 8},
    "no page_size": slots(),
    "num_threads": {"num_threads": 0},
    "causal of each": {"causal": [True]},
    "floats as lengths": {"q_lens": np.array([3.0, 1, 0])},
    "uint16": {"q": np.zeros((4, 4, 32), np.uint16)},
    "negative stride": {"relative_bias": numbers(4, 9)[::-1]},
}
#: Begin of the advice in errors, which differs between Python and C.
OTHER_ADVICE = {"uint16": "; if these are", "negative stride": " ("}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_have_the_words_of_python(name):
    options = {**tensors(), **BATCH, **REFUSED[name]}
    with pytest.raises((ValueError, TypeError)) as there:
        cpattn.paged_attention(**options)
    with pytest.raises(CallFailed) as here:
        attend(options)
    message, status = here.value.args
    assert status == 1
    cut = OTHER_ADVICE.get(name, "\n")
    assert message.partition(cut)[0] == str(there.value).partition(cut)[0]


def test_each_thread_has_its_own_message():
    all_have_failed = threading.Barrier(4)

    def message(number: int) -> str:
        status = load().cpattn_set_num_threads(-number)
        all_have_failed.wait()
        return f"{status} {load().cpattn_last_error().decode()}"

    with ThreadPoolExecutor(4) as pool:
        messages = list(pool.map(message, range(4)))
    rule = "1 set_num_threads: num_threads must be >= 1, got"
    assert messages == [f"{rule} {-number}" for number in range(4)]


@pytest.mark.parametrize(
    "split",
    [{"strategy": "zigzag"}, {"strategy": "interleave"}, {"strategy": "contiguous"},
     {"strategy": "zigzag", "weights": np.array([1, 2.5, 1, 0.5]), "page_size": 4}],
    ids=str,
)  # fmt: skip
def test_context_parallel_metadata(split):
    options = {"cp_size": 4, "cp_rank": 2, **split}
    lens = {"extend_lens": [30, 17, 9], "seq_lens": [35, 17, 10]}
    metadata = cpattn.build_cp_metadata(**lens, **options)
    given, handle = Given(), ctypes.c_void_p()
    call("build_cp_metadata", given.options("cp_batch", **lens, **options), ctypes.byref(handle))
    values, size = ctypes.POINTER(ctypes.c_int32)(), ctypes.c_int64()
    fields = {**metadata.to_dict(), "local_q_indices": metadata.local_q_indices}
    for name in fields.keys() - {"strategy", "kv_len_convention"}:
        expected = fields[name]
        if isinstance(expected, int) or name == "max_seqlen_q_combined":
            call("cp_metadata_int", handle, name.encode(), ctypes.byref(size))
            assert size.value == (-1 if expected is None else expected), name
            continue
        call("cp_metadata_array", handle, name.encode(), ctypes.byref(values), ctypes.byref(size))
        assert bool(values) == (expected is not None), name
        assert values[: size.value] == list(() if expected is None else expected), name
    load().cpattn_cp_metadata_destroy(handle)


def test_topk_transform():
    logits, out = numbers(3, 50), np.empty((3, 8), np.int32)
    options = {
        "logits": logits, "topk": 8, "lengths": [50, 20, 3], "row_starts": [0, 5, 2],
        "page_table": RNG.integers(0, 90, (2, 60)), "cu_seqlens_q": [0, 1, 3],
        "batch_idx_list": [1, 0], "method": cpattn.TopkTransformMethod.PAGED, "page_size": 2,
        "sorted": False,
    }  # fmt: skip
    expected = cpattn.sparse.topk_transform(**options)
    call("topk_transform", Given().options("topk_options", **options, out=out))
    np.testing.assert_array_equal(out, expected)
    with pytest.raises(ValueError, match="topk_transform: method must be") as there:
        cpattn.sparse.topk_transform(**{**options, "method": 3})
    with pytest.raises(CallFailed) as here:
        call("topk_transform", Given().options("topk_options", **{**options, "method": 3}, out=out))
    assert here.value.args[0] == str(there.value)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_writes_into_pages(kv_layout):
    rows = {"k": numbers(5, 2, 32), "v": numbers(5, 2, 32)}
    shape = (10, 16, 2, 32) if kv_layout == "NHD" else (10, 2, 16, 32)
    options = {"slots": [3, -1, 70, 3, 159], "kv_layout": kv_layout, "k_scale": 0.5}
    pages = [np.zeros(shape, ml_dtypes.float8_e4m3fn) for _ in range(4)]
    cpattn.kv.write_pages(**rows, **options, k_pages=pages[0], v_pages=pages[1])
    call(
        "write_pages",
        Given().options("page_writes", **rows, **options, k_pages=pages[2], v_pages=pages[3]),
    )
    assert_same_bits(pages[0], pages[2])
    assert_same_bits(pages[1], pages[3])


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_digests_of_buffers(kv_layout):
    shape = (9, 2, 4, 2, 8) if kv_layout == "NHD" else (9, 2, 2, 4, 8)
    caches = numbers(*shape)  # keys and values alternate, so pages have gaps
    pages = {"pages": [7, 2, 5], "start": 8, "first_token": 10, "num_tokens": 7, "block_tokens": 4}
    ranks = {"tp_rank": 1, "tp_size": 2, "total_kv_heads": 4}
    entry = KVEntry.from_tensor(3, "v", caches[:, 1], kv_layout=kv_layout)
    (expected,) = digest(KVLayout([entry], page_size=4, **ranks), **pages).buffers
    given, sums, rows = Given(), (ctypes.c_uint64 * 3)(), ctypes.c_int64()
    options = {"tensor": caches[:, 1], "kind": "v", "layer_id": 3, "kv_layout": kv_layout}
    asked = given.options("kv_digest", **options, **ranks, **pages)
    call("digest", asked, sums, ctypes.c_int64(3), ctypes.byref(rows))
    assert (list(sums), rows.value) == (expected.sums.tolist(), expected.num_rows)
    with pytest.raises(
        CallFailed, match=r"num_sums must be 3, one for each block of 4 pos.* got 2"
    ):
        call("digest", asked, sums, ctypes.c_int64(2), None)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "q"}, 'digest: kind must be k, v, .*, got "q"'),
        ({"pages": [9]}, "digest: .*9"),
        ({"block_tokens": 0}, "digest: block_tokens must be >= 1, got 0"),
        ({"num_threads": 0}, "digest: num_threads must be >= 1, got 0"),
        ({"tensor": numbers(9, 4, 4, 8)[:, :, ::2]}, "digest: pages of tensor must have bytes, be"),
        ({"tensor": numbers(9, 4, 8)}, "digest: tensor must have 4 dimensions"),
    ],
)
def test_digests_that_are_refused(wrong, message):
    options = {"tensor": numbers(9, 4, 2, 8), "pages": [3]} | wrong
    sums = (ctypes.c_uint64 * 1)(5)
    with pytest.raises(CallFailed, match=message):
        call("digest", Given().options("kv_digest", **options), sums, ctypes.c_int64(1), None)
    assert sums[0] == 5
