# SPDX-License-Identifier: Apache-2.0
"""Parts of bench_torch_ops.py and bench_torch_npu.py: the overhead of a call."""
