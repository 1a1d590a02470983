# SPDX-License-Identifier: Apache-2.0
"""What `cpattn plan` takes a rank for where nothing is given and nothing measured.

These are constants, not rates of the machine that asks: the same question has the same answer on
every machine and on every day.
"""

from __future__ import annotations

THREADS = 32
#: 10^9 flop/s of one thread, by the dtype of queries, keys and values: causal attention to 8192 new
#: tokens (4096 in float16 and float32), on two threads of an AMD EPYC with AVX512_BF16.
THREAD_GFLOPS = {"bfloat16": 440.0, "float16": 230.0, "float32": 230.0}


def describe(dtype: str) -> str:
    """Of what assumed rates are; those of exchanges are the defaults of `Rates`."""
    return (
        f"Assumed rates are not of this machine: a rank is {THREADS} threads of an AMD EPYC with "
        f"AVX512_BF16, {THREAD_GFLOPS[dtype]:.0f} GFLOP/s each in {dtype}, the network gloo over "
        "10 Gbit/s. --calibrate measures here."
    )
