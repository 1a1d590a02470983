# SPDX-License-Identifier: Apache-2.0
"""Plans of each rank's share of a batch: rows, keys and heads, as integers."""
