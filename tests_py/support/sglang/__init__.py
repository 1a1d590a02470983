# SPDX-License-Identifier: Apache-2.0
"""Parts of sglang, from its package or its wheels, run on a CPU."""
