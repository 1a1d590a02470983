# SPDX-License-Identifier: Apache-2.0
"""Sparse attention over pools of which each rank holds a share."""
