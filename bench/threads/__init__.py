# SPDX-License-Identifier: Apache-2.0
"""What bench_threads.py measures: short calls of several threads, and products of torch beside."""
