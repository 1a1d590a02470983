# SPDX-License-Identifier: Apache-2.0
"""Assumptions of `cpattn plan` on a rank, where nothing is given and nothing measured.

These are constants, not rates of the machine that asks: the same question has the same answer on
every machine and on every day.
"""

from __future__ import annotations

from collections.abc import Collection

THREADS = 32
#: 10^9 flop/s of one thread, by the dtype of queries, keys and values: causal attention to 8192 new
#: tokens (4096 in float16 and float32), on two threads of an AMD EPYC with AVX512_BF16.
THREAD_GFLOPS = {"bfloat16": 440.0, "float16": 230.0, "float32": 230.0}


def describe(dtype: str, assumed: Collection[str]) -> str:
    """Describe the machines that the assumed rates (fields of `Rates`) are of; "" for none."""
    parts = []
    if {"threads", "gflops"} & set(assumed):
        parts.append(
            f"a rank is {THREADS} threads of an AMD EPYC with AVX512_BF16, "
            f"{THREAD_GFLOPS[dtype]:.0f} GFLOP/s each in {dtype}"
        )
    if {"gather_gb_per_s", "latency_us", "message_us", "store_gb_per_s"} & set(assumed):
        parts.append("the network is gloo over 10 Gbit/s")
    if not parts:
        return ""
    return f"Assumed, not measured: {'; '.join(parts)}. --calibrate measures this machine."
