# SPDX-License-Identifier: Apache-2.0
"""Ranks in processes of their own, and the batches that they share."""
