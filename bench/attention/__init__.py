# SPDX-License-Identifier: Apache-2.0
"""What bench_attention.py measures: workloads, and the engines that take part, in `peers`."""
