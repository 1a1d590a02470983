# SPDX-License-Identifier: Apache-2.0
"""What bench_vllm.py serves: a model of random weights, a load from a trace, engines to race."""
