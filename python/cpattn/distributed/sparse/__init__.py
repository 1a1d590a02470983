# SPDX-License-Identifier: Apache-2.0
"""Sparse attention over sharded pools."""
