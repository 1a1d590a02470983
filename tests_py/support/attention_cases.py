# SPDX-License-Identifier: Apache-2.0
"""Cases of paged attention with the oracle's results."""

import functools
import math

import torch

import cpattn
from support.cases import Case, expected_attention, make_inputs, numbers, random_bias

DEFAULT = Case()

# Head dimensions by vector width and tail, each with query and KV heads.
SHAPES = [
    DEFAULT.with_(head_dim=head_dim, v_head_dim=v_head_dim, num_heads=heads, num_kv_heads=kv_heads)
    for head_dim, v_head_dim, heads, kv_heads in [
        *[(16, None, 1, 1), (32, 48, 3, 3), (64, None, 8, 2), (80, None, 5, 1), (96, 16, 6, 3)],
        *[(112, 128, 2, 2), (128, None, 32, 8), (192, 128, 4, 4), (256, None, 4, 1)],
        *[(576, 512, 16, 1), (64, None, 64, 1), (20, 40, 6, 2), (72, None, 3, 3)],
    ]
]
# Key lengths around multiples of pages and blocks, query lengths around multiples of rows.
LENGTHS = [
    DEFAULT.with_(kv_lens=kv_lens, q_lens=q_lens, page_size=page_size)
    for kv_lens, q_lens, page_size in [
        *[((1, 15, 16, 17), (1, 1, 16, 17), 16), ((63, 64, 65, 127), (2, 3, 4, 5), 64)],
        *[((128, 129, 255), (6, 7, 8), 64), ((256, 257, 300), (9, 10, 11), 128)],
        *[((511, 512, 513), (12, 13, 14), 512), ((1023, 1024, 1025, 2049), (3, 4, 5, 6), 64)],
        *[((31, 33, 5), (15, 16, 5), 1), ((0, 7, 0, 3), (2, 0, 0, 9), 16), ((5, 1), (17, 3), 16)],
        *[((700,), (130,), 128), ((), (), 16)],
    ]
] + [
    DEFAULT.with_(kv_lens=(5, 1), q_lens=(17, 3), options={"first_positions": (0, 0)}),
    DEFAULT.with_(kv_lens=(300,), q_lens=(2,), options={"first_positions": (170,), "window": 9}),
]
OPTIONS = [
    DEFAULT.with_(options=options)
    for options in [
        *[{"causal": False}, {"scale": 0.3}, {"window": 0}, {"window": 3}, {"window": 16}],
        *[{"causal": False, "window": sides} for sides in ((0, 0), (3, 5), (None, 2), (16, None))],
        *[{"causal": (True, False)}, {"causal": (False, True), "window": (9, 4)}],
        *[{"first_positions": (0, 0), "window": w} for w in (None, 2)],
        {"first_positions": (-3, 25), "window": (6, 3), "causal": (True, False)},
        *[{"window": 10**12}, {"softcap": 2.0}, {"softcap": 30.0, "window": 5}],
        {"sinks": torch.tensor([0.5, -2.0, math.inf, -math.inf])},
        {"sinks": torch.tensor([100.0, -100.0, 1.0, 2.0]), "softcap": 3.0},
    ]
]
# Lengths around blocks of keys, for one new token and for many.
_LENS = {"q_lens": (1, 0, 40), "kv_lens": (300, 5, 70)}
BIASES = [
    DEFAULT.with_(**_LENS, options=options)
    for options in [
        {"alibi_slopes": torch.tensor([0.5, 0.03, -0.1, 0.0])},
        {"alibi_slopes": numbers(3, 4), "causal": False, "window": (9, 30)},
        {"relative_bias": numbers(4, 49), "softcap": 3.0},
        {"relative_bias": numbers(4, 1), "causal": False},
        {"alibi_slopes": numbers(4), "relative_bias": numbers(4, 9), "first_positions": (7, 0, 2)},
        {"bias": random_bias(**_LENS, num_heads=4)},
        {"bias": random_bias(**_LENS, num_heads=1, dtype="float16"), "window": 50},
        {"bias": numbers(3, 1, 1, 301).bfloat16(), "causal": False},
        {"bias": numbers(300, 41, 4, 1).permute(3, 2, 1, 0), "sinks": numbers(4)},
        {
            "bias": numbers(1, 4, 41, 1),
            "relative_bias": numbers(4, 11),
            "alibi_slopes": numbers(4) / 16,
            "softcap": 2.0,
            "sinks": numbers(4),
        },
    ]
]
WINDOWS = [
    DEFAULT.with_(kv_lens=(300, 70), q_lens=(40, 70), page_size=page_size, options={"window": w})
    for page_size, w in [(16, 0), (64, 7), (128, 64), (1, 200)]
]


def run(inputs, **options):
    return cpattn.paged_attention(**inputs, return_lse=True, **options)


def plan_of(inputs, **options):
    q, k_cache, v_cache = (inputs[name] for name in ("q", "k_cache", "v_cache"))
    return cpattn.plan_attention(
        **{name: inputs[name] for name in ("q_lens", "kv_lens", "block_tables", "page_size")},
        num_pages=len(k_cache), num_heads=q.shape[1], num_kv_heads=k_cache.shape[2],
        head_dim=q.shape[2], v_head_dim=v_cache.shape[3], **options,
    )  # fmt: skip


def with_scale(case):
    """Add a scale if head_dim > 256, which has no default; MLA scales by the unabsorbed width."""
    if case.head_dim <= 256 or "scale" in case.options:
        return case
    return case.with_(options=case.options | {"scale": 192**-0.5})


ALL_CASES = SHAPES + LENGTHS + OPTIONS + BIASES + WINDOWS


@functools.cache
def inputs_and_expected(index, dtype):
    """Make inputs and results once for all instruction sets."""
    inputs = make_inputs(with_scale(ALL_CASES[index].with_(dtype=dtype)))
    return inputs, expected_attention(inputs)
