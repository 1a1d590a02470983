# SPDX-License-Identifier: Apache-2.0
"""Parts of sglang, of its package or its wheels, run on a CPU."""
