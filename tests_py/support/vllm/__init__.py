# SPDX-License-Identifier: Apache-2.0
"""Engine and server of vLLM, with small models."""
