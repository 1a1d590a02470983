# SPDX-License-Identifier: Apache-2.0
"""Batches of the indexer, top-k and sparse MLA."""
