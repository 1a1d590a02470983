# SPDX-License-Identifier: Apache-2.0
"""What bench_vllm.py and bench_sglang_engine.py serve: models of random weights, loads, engines."""
