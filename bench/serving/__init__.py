# SPDX-License-Identifier: Apache-2.0
"""Parts of bench_vllm.py and bench_sglang_engine.py: random models, loads, engines."""
