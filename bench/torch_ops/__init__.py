# SPDX-License-Identifier: Apache-2.0
"""What a call costs besides its work: of bench_torch_ops.py and bench_torch_npu.py."""
