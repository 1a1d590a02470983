# SPDX-License-Identifier: Apache-2.0
"""The core refuses tensors in one block of memory if it would write a result over inputs or over
another result. Plans do not change when the caller uses its buffers again."""

import threading

import numpy as np
import pytest
import torch

import cpattn
from cpattn import _core
from support.attention_cases import plan_of
from support.cases import Case, make_inputs
from support.tolerances import EPS, TOLERANCES

I32, I64, U8, E4M3 = torch.int32, torch.int64, torch.uint8, torch.float8_e4m3fn
MEMORY = torch.zeros(1 << 16, dtype=U8)


def own(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def shared(like, at):
    """Return a tensor like this one in the block of memory, from byte `at` on."""
    return MEMORY[at : at + like.nbytes].view(like.dtype).view(like.shape)


def split_norm(x, **outputs):
    _core.split_qk_norm(x, own(16), own(16), None, None, 16, 16, 8, 1e-6, 1e-6, **outputs)


def topk_slots(page_table, out):
    _core.fast_topk_transform_fused(own(2, 8), [8, 8], page_table, None, 1, 4, None, True, out)


def indexer(function, dtype, **options):
    """Make a call with scales, and ranges of all keys."""
    tensors = {"q": own(2, 4, 32), "k": own(8, 32), "weights": own(2, 4), "k_scale": own(8)}
    return (
        lambda **tensors: function(**tensors, ks=[0, 0], ke=[8, 8], **options),
        tensors | {"out": own(2, 8, dtype=dtype)},
        [f"{name} out" for name in tensors],
    )


def sparse_mla(**tensors):
    _core.flash_mla_sparse_fwd(
        **tensors, sm_scale=1.0, d_v=32, attn_sink=None, topk_length=None, num_threads=None
    )


def sparse_flash(**tensors):
    _core.npu_sparse_flash_attention(
        **tensors, scale_value=1.0, block_table=None, actual_seq_lengths_query=None,
        actual_seq_lengths_kv=None, sparse_block_size=1, layout_query="BSND", layout_kv="BSND",
        sparse_mode=0, pre_tokens=2**63 - 1, next_tokens=2**63 - 1, attention_mode=2,
    )  # fmt: skip


NORM = {"x": own(2, 40), "q": own(2, 16), "k_nope": own(2, 1, 16), "k_pe": own(2, 1, 8)}
READ = {"q": own(2, 4, 32), "kv": own(8, 1, 32), "indices": own(2, 4, dtype=I32)}
WRITTEN = {"out": own(2, 4, 32), "max_logits": own(2, 4), "lse": own(2, 4)}
FLASH = {"query": own(1, 2, 4, 32), "key": own(1, 8, 1, 32), "value": own(1, 8, 1, 32)}
FLASH |= {"query_rope": own(1, 2, 4, 16), "key_rope": own(1, 8, 1, 16)}
FLASH |= {"sparse_indices": own(1, 2, 1, 4, dtype=I32)}
FLASHED = {"out": own(1, 2, 4, 32), "softmax_max": own(1, 2, 4), "softmax_sum": own(1, 2, 4)}
# Each name has the function, all its tensors, and pairs of them that may not overlap.
CALLS = {
    "hadamard_transform": (
        lambda **tensors: _core.hadamard_transform(**tensors, scale=1.0),
        {"x": own(2, 8), "out": own(2, 8)},
        ["x out"],
    ),
    "quantize_index": (
        lambda **tensors: _core.quantize_index(power_of_two=False, **tensors),
        {"x": own(2, 128), "codes": own(2, 128, dtype=E4M3), "scale": own(2, 1)},
        ["x codes", "x scale", "codes scale"],
    ),
    "read_index_k_cache": (
        lambda **tensors: _core.read_index_k_cache(slots=[0], **tensors),
        {"cache": own(1, 132, dtype=U8), "codes": own(1, 128, dtype=E4M3), "scale": own(1)},
        ["cache codes", "cache scale"],
    ),
    "split_qk_norm": (
        split_norm,
        NORM | {"latent": own(2, 1, 24)},
        ["x q", "x latent", "k_pe k_nope"],
    ),
    "fast_topk": (
        lambda score, out: _core.fast_topk(score, [8, 8], 4, None, True, out),
        {"score": own(2, 8), "out": own(2, 4, dtype=I32)},
        ["score out"],
    ),
    "fast_topk_transform_fused": (
        topk_slots,
        {"page_table": own(2, 8, dtype=I32), "out": own(2, 4, dtype=I32)},
        ["page_table out"],
    ),
    "transform_index_page_table_decode": (
        lambda page_table, topk_indices, out: _core.transform_index_page_table_decode(
            page_table, topk_indices, 1, out
        ),
        {"page_table": own(2, 8, dtype=I64), "topk_indices": own(2, 4, dtype=I32)}
        | {"out": own(2, 4, dtype=I32)},
        ["page_table out", "topk_indices out"],
    ),
    "indexer_logits": indexer(_core.indexer_logits, torch.float32),
    "indexer_topk": indexer(_core.indexer_topk, I32, sorted=True),
    "flash_mla_sparse_fwd": (
        sparse_mla,
        READ | WRITTEN,
        [f"{read} {result}" for read in READ for result in WRITTEN] + ["lse max_logits"],
    ),
    "npu_sparse_flash_attention": (
        sparse_flash,
        FLASH | FLASHED,
        [f"{read} {result}" for read in FLASH for result in ("out", "softmax_sum")]
        + ["softmax_max softmax_sum", "out softmax_sum"],
    ),
}
OVERLAPS = [(name, pair) for name, (_, _, pairs) in CALLS.items() for pair in pairs]


@pytest.mark.parametrize(("name", "pair"), OVERLAPS)
def test_memory_is_shared_by_nothing_that_is_written(name, pair):
    """Two tensors begin together, or one begins in the last bytes of the other."""
    call, tensors, _ = CALLS[name]
    first, second = pair.split()
    call(**tensors)  # this is right without overlaps
    for at in (0, tensors[first].nbytes - 4):
        overlapping = {first: shared(tensors[first], 0), second: shared(tensors[second], at)}
        with pytest.raises(ValueError, match="must not overlap"):
            call(**tensors | overlapping)
    assert not MEMORY.any()


def test_indices_that_change_during_the_call_read_no_other_memory():
    """Indices are read once, so those that were checked are those that are used."""
    indices = torch.zeros(64, 512, dtype=torch.int32)
    q, kv = torch.ones(64, 16, 32), torch.ones(16, 1, 32)
    stop = threading.Event()

    def change():
        while not stop.is_set():
            indices.fill_(2**30)
            indices.fill_(3)

    rounding = TOLERANCES["attention", "float32"] * EPS["float32"]
    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(100):
            out, _, _ = cpattn.sparse.flash_mla_sparse_fwd(q, kv, indices, 0.1, d_v=32)
            assert torch.all((out == 0) | ((out - 1).abs() <= rounding))  # all values are ones
    finally:
        stop.set()
        thread.join()


def test_plans_keep_what_they_were_made_of_when_buffers_are_used_again():
    inputs = make_inputs(Case(q_lens=(40, 1, 30, 9), kv_lens=(130, 90, 30, 64)))
    buffers = {name: np.array(inputs[name]) for name in ("q_lens", "kv_lens", "block_tables")}
    plan = plan_of(inputs | buffers)
    for buffer in buffers.values():
        buffer[...] = 1 << 30
    assert plan == plan_of(inputs)
