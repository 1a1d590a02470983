# SPDX-License-Identifier: Apache-2.0
"""npu_fused_infer_attention_score refuses wrong arguments, with clear messages."""

import pytest
import torch
from torch import zeros

from cpattn.npu import npu_fused_infer_attention_score as fia
from support.npu.fia_cases import TEMPLATE, FiaBatch

ROWS = {"layout": "BSND", "blocks": None}
FLAT, HEADS_OF_THREE = ROWS | {"layout": "BSH"}, {"num_heads": 3, "num_key_value_heads": 3}
BLOCKS = {"layout": "BSND", "blocks": "H"}
PACKED = {"layout": "TND", "blocks": None}
PACKED_BLOCKS = {"layout": "TND", "blocks": "N"}


QUERY_ROPE = zeros(3, 9, 4, 16)


def mask(*shape):
    return zeros(shape, dtype=torch.bool)


def band(before, after):
    return {"pre_tokens": before, "next_tokens": after}


def ropes(key_rope, query_rope=QUERY_ROPE):
    return {"query_rope": query_rope, "key_rope": key_rope}


# Three sequences of 5, 1, 7 queries and 20, 17, 7 keys, 4 heads on 2, dimension 32; S1 9, S2 22;
# blocks of 16.
REFUSED = [
    (ROWS, {"input_layout": "SBH"}, "input_layout must be one of BSH, .*NTD_TND, got 'SBH'"),
    (ROWS, {"input_layout": "BSH"}, r"query must have 3 dimensions, got shape \[3, 9, 4, 32\]"),
    (ROWS, {"num_heads": 8}, r"query \(BSND\) must have 8 heads, got 4 in shape \[3, 9, 4, 32\]"),
    (ROWS, {"num_key_value_heads": 4}, r"key \(BSND\) must have 4 heads, got 2"),
    (ROWS, {"num_key_value_heads": 0}, r"key \(BSND\) must have 4 heads, got 2"),
    (ROWS, {"num_key_value_heads": 3}, "num_heads must be a positive multiple of num_key_value_"),
    (ROWS, {"num_heads": 0}, "num_heads must be a positive multiple of .*, got 0 and 2"),
    (FLAT, HEADS_OF_THREE, "query must have a last dimension that its 3 heads divide"),
    (ROWS, {"sparse_mode": 5}, r"sparse_mode must be in \[0, 4\], got 5"),
    (ROWS, {"sparse_mode": -1}, r"sparse_mode must be in \[0, 4\], got -1"),
    (ROWS, {"inner_precise": 4}, r"inner_precise must be in \[0, 3\], got 4"),
    (ROWS, {"scale": float("inf")}, "scale must be a positive number"),
    # Masks.
    *((ROWS, {"sparse_mode": n}, f"sparse_mode {n} needs atten_mask") for n in (1, 2, 3, 4)),
    (ROWS, {"sparse_mode": 3, "atten_mask": mask(9, 22)}, r"atten_mask must be the \[2048, 2048\]"),
    (ROWS, {"sparse_mode": 4, "atten_mask": mask(2, 2048, 2048)}, "must be the .* template"),
    (ROWS, {"atten_mask": mask(9, 21)}, r"atten_mask must be \[S1, S2\], .* with B = 3, S1 = 9, S"),
    (ROWS, {"atten_mask": mask(2, 9, 22)}, "atten_mask must be .*, got shape"),
    (ROWS, {"atten_mask": mask(3, 4, 9, 22)}, "atten_mask must be .*, got shape"),
    (ROWS, {"atten_mask": mask(22)}, "atten_mask must have 2 to 4 dimensions"),
    (ROWS, {"atten_mask": zeros(9, 22)}, "atten_mask must be bool, int8 or uint8, got float"),
    (BLOCKS, {"atten_mask": mask(9, 19)}, "atten_mask must be .* S2 = 20 or more, got shape"),
    (ROWS, {"atten_mask": mask(9, 22)} | band(-3, 2), r"\+ next_tokens must be >= 0 .*, got -3 an"),
    (ROWS, {"atten_mask": TEMPLATE, "sparse_mode": 4} | band(1, -2), r"pre_tokens \+ next_tokens "),
    (PACKED, {"atten_mask": TEMPLATE}, "TND takes sparse_mode 0 without atten_mask or 3 with it, "),
    (PACKED, {"atten_mask": TEMPLATE, "sparse_mode": 2}, "TND takes .*, got 2 with it"),
    # Lengths.
    (ROWS, {"actual_seq_lengths": [5, 1]}, "actual_seq_lengths must have 1 or at least B = 3 entr"),
    (ROWS, {"actual_seq_lengths": [5, 10, 7]}, r"actual_seq_lengths must be in \[0, 9\], got 10 a"),
    (ROWS, {"actual_seq_lengths": [-1]}, r"actual_seq_lengths must be in .*, got -1 at index 0"),
    (ROWS, {"actual_seq_lengths_kv": [23]}, r"actual_seq_lengths_kv must be in \[0, 22\], got 23"),
    (ROWS, {"actual_seq_lengths_kv": [1, 2]}, "actual_seq_lengths_kv must have 1 or at least B"),
    (BLOCKS, {"actual_seq_lengths_kv": None}, "actual_seq_lengths_kv is mandatory with block_tab"),
    (PACKED, {"actual_seq_lengths": None}, "actual_seq_lengths is mandatory for TND"),
    (PACKED, {"actual_seq_lengths_kv": None}, "actual_seq_lengths_kv is mandatory .* TND"),
    (PACKED, {"actual_seq_lengths": [5, 4, 13]}, "actual_seq_lengths must be prefix sums, which n"),
    (PACKED, {"actual_seq_lengths": [-1, 6, 13]}, "must be prefix sums, .*, got -1 after 0 at ind"),
    (PACKED, {"actual_seq_lengths": [5, 6, 12]}, "actual_seq_lengths must end at the number of pa"),
    (PACKED, {"actual_seq_lengths_kv": [20, 37, 45]}, "actual_seq_lengths_kv must end at .* 44, g"),
    (PACKED, {"actual_seq_lengths_kv": [20, 44]}, r"actual_seq_lengths_kv must have as many entri"),
    (PACKED_BLOCKS, {"actual_seq_lengths_kv": [20, 17]}, r"must have as many entries as .*, got 2"),
    # Blocks.
    (BLOCKS, {"block_size": 0}, r"block_size must be in \[1, 2147483647\] with"),
    (BLOCKS, {"block_size": 8}, "key must have blocks of block_size 8 and 2 heads, got shape"),
    (BLOCKS, {"block_table": [[0, 1, 2]]}, r"block_table must have one row per sequence \(3\), go"),
    (BLOCKS, {"block_table": [[0], [1], [2]]}, r"actual_seq_lengths_kv must be in \[0, 16\], got "),
    (BLOCKS, {"block_table": [[0, 6], [1, 2], [3, -1]]}, r"page ids must be in \[0, 6\), got 6 at"),
    (BLOCKS, {"block_table": [[0, 1], [2, 3], [-1, -1]]}, "got -1 at position 0 of sequence 2"),
    (BLOCKS, {"key": zeros(6, 2, 16, 32)}, r"key must be \[blocks, block_size, H\] when pag"),
    (PACKED_BLOCKS, {"key": zeros(6, 16, 2, 32)}, "key must have blocks of block_size 16 an"),
    (PACKED_BLOCKS, {"key": zeros(6, 2, 2, 16, 16)}, "key must be .* when paged or"),
    # Tensors.
    (ROWS, {"query": zeros(3, 9, 4, 32).double()}, "query must be float32, float16 or bflo"),
    (ROWS, {"key": zeros(3, 22, 2, 32).half()}, "key must be float32 like query, got float1"),
    (ROWS, {"key": zeros(3, 22, 2, 48)}, "key must have the head dimension of query, 32, go"),
    (ROWS, {"value": zeros(3, 21, 2, 32)}, r"value must hold the tokens that key holds"),
    (ROWS, {"key": zeros(2, 22, 2, 32), "value": zeros(2, 22, 2, 32)}, "key and value must have t"),
    (ROWS, {"query": zeros(3, 9, 4, 64)[..., ::2]}, "query must be contiguous in its last"),
    (ROWS, {"query_rope": QUERY_ROPE}, "query_rope and key_rope must be given toge"),
    (ROWS, ropes(zeros(3, 22, 2, 32)), "query_rope must have the tokens and heads of query and th"),
    (ROWS, ropes(zeros(3, 22, 2, 16), QUERY_ROPE.half()), "query_rope must be float32 like query,"),
    (ROWS, ropes(zeros(3, 21, 2, 16)), "key_rope must hold the tokens that key holds"),
]


@pytest.mark.parametrize(("form", "change", "message"), REFUSED, ids=lambda x: str(x)[:60])
def test_value_errors(form, change, message):
    arguments = FiaBatch(q_lens=(5, 1, 7), kv_lens=(20, 17, 7), **form).arguments()
    with pytest.raises(ValueError, match=message) as error:
        fia(**arguments | change)
    assert str(error.value).startswith("npu_fused_infer_attention_score: ")
