# SPDX-License-Identifier: Apache-2.0
"""Batches over ranks, counted independently of the library."""
