# SPDX-License-Identifier: Apache-2.0
"""Ranks in separate processes, and the batches that they share."""
