# SPDX-License-Identifier: Apache-2.0
"""Rates that `cpattn plan` assumes if none are given or measured.

They are constants and independent of the machine in use: the same question always has the same
answer.
"""

from __future__ import annotations

from collections.abc import Collection

THREADS = 32
#: 10^9 flop/s of one thread, by dtype of queries, keys and values: causal attention up to 8192 new
#: tokens (4096 in float16 and float32), on two threads of an AMD EPYC with AVX512_BF16.
THREAD_GFLOPS = {"bfloat16": 440.0, "float16": 230.0, "float32": 230.0}
#: 10^9 bytes per second that one thread copies into a pool, and all threads of a host.
THREAD_STORE_GB_PER_S, STORE_GB_PER_S = 4.0, 40.0


def describe(dtype: str, assumed: Collection[str]) -> str:
    """Describe the machines behind the assumed rates (fields of `Rates`); "" if none is assumed."""
    parts = []
    if {"threads", "gflops"} & set(assumed):
        parts.append(
            f"a rank is {THREADS} threads of an AMD EPYC with AVX512_BF16, "
            f"{THREAD_GFLOPS[dtype]:.0f} GFLOP/s each in {dtype}"
        )
    if any("gb_per_s" in name for name in assumed) or {"latency_us", "message_us"} & set(assumed):
        parts.append("the network is gloo over 10 Gbit/s")
    if not parts:
        return ""
    return f"Assumed, not measured: {'; '.join(parts)}. --calibrate measures this machine."
