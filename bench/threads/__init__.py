# SPDX-License-Identifier: Apache-2.0
"""Parts of bench_threads.py: short calls of several threads, and products of torch."""
