# SPDX-License-Identifier: Apache-2.0
"""`scripts/arm_model.py`: loops that it finds in machine code."""

from __future__ import annotations

import arm_model

DISASSEMBLY = """
0000000000000000 <void cpattn::kernels::(anonymous namespace)::multiply<4>(float*)>:
   0:	ldr	q0, [x0]
   4:	cbz	x1, 28 <void multiply<4>(float*)+0x28>
   8:	ldr	s1, [x2]
   c:	fmla	v2.4s, v0.4s, v1.s[0]  // by element
  10:	cmp	x0, x1
  14:	b.ne	8 <void multiply<4>(float*)+0x8>
  18:	b	0 <void multiply<4>(float*)>
  1c:	ldr	q3, [x3]
  20:	add	x3, x3, #0x10
  24:	b.ne	1c <void multiply<4>(float*)+0x1c>
  28:	ret
"""


def test_loops_without_branches_that_multiply_are_found():
    (loop,) = arm_model.loops_of(DISASSEMBLY)
    assert loop.function == "void multiply<4>(float*)"
    assert loop.lines == (
        "ldr\ts1, [x2]", "fmla\tv2.4s, v0.4s, v1.s[0]", "cmp\tx0, x1"
    )  # fmt: skip
    assert loop.num_products == 1
