# SPDX-License-Identifier: Apache-2.0
"""All arrays of a plan in one, as an engine copies them to a device."""

from __future__ import annotations

import numpy as np
import pytest

import cpattn

FIELDS = [
    f"{family}_{half}_tensor"
    for family in ("kv_len", "actual_seq_q", "cu_seqlens_q", "cu_seqlens_kv")
    for half in ("prev", "next", "combined")
]


@pytest.mark.parametrize("bs", [1, 3, 16, 40])
@pytest.mark.parametrize("alignment", [1, 4, 16])
def test_packed_tensors(bs, alignment):
    plan = cpattn.build_cp_metadata([9] * bs, [9 + s for s in range(bs)], cp_rank=1, cp_size=3)
    packed, sizes = plan._packed_tensors(alignment)
    assert packed.dtype == np.int32
    assert packed.flags.writeable
    assert len(packed) == sum(sizes)
    ends = np.cumsum(sizes)
    step = 1 if alignment == 1 else 2
    assert not ((ends - sizes)[::step] % alignment).any()
    parts = np.split(packed, ends[:-1])[::step]
    for name, part in zip(FIELDS, parts, strict=True):
        np.testing.assert_array_equal(part, getattr(plan, name))
    packed[:] = -1  # a copy: the plan stays what it is
    assert plan.kv_len_prev_tensor.min() > 0


def test_packed_tensors_of_a_plan_without_them():
    for strategy in ("interleave", "contiguous"):
        plan = cpattn.build_cp_metadata([9], cp_rank=0, cp_size=2, strategy=strategy)
        with pytest.raises(ValueError, match="_tensor exists for zigzag only"):
            plan._packed_tensors(1)
