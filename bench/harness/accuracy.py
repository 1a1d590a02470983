# SPDX-License-Identifier: Apache-2.0
"""Tolerances of timed results: the only place with such numbers.

Each engine rounds in other places, so these are no error bounds, unlike those of the tests. They
tell roundings from mistakes.
"""

#: Of a row's norm, in spacings of the dtype. Probabilities and output are rounded once each.
ATTENTION = {"float32": 64, "bfloat16": 4, "float16": 4}
#: Of a row's norm: what OpenVINO's own 8-bit codes add. Normal keys within a page and channel are
#: rounded by 0.005 of their deviation, values of a token by 0.006, together 0.008; e5m2 codes have
#: longer tails. A row may have twice that.
OWN_CODES = {"openvino_pa": 0.016}
#: Of a row's norm. Both round probabilities and output to bfloat16, torch the scores, too.
SPARSE_MLA = {"cpattn": 0.015, "torch": 0.04}
#: Of the largest score of a row: rounding of float32 sums, and of bfloat16 products.
INDEXER = {"cpattn": 1e-5, "torch": 0.03}
#: Of the norm of all rows, in bfloat16.
NORMS = 0.01
#: Of a row's norm. Each layer rounds to bfloat16 what it adds to the others.
TRANSFORMERS = {"model": 0.1, "layer": 0.03}
#: Share of first tokens that may be others: roundings decide where two are equally good.
FIRST_TOKENS = 0.25


def attention(dtype: str, module: str, kv_dtype: str | None) -> float:
    """The largest error of the module's result, as a share of a row's norm."""
    spacing = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}[dtype]
    return ATTENTION[dtype] * spacing + (OWN_CODES.get(module, 0.0) if kv_dtype else 0.0)
