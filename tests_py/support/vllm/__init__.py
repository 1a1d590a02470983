# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine and server, with small models."""
