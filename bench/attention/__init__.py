# SPDX-License-Identifier: Apache-2.0
"""Parts of bench_attention.py: workloads, and the engines that take part, in `peers`."""
