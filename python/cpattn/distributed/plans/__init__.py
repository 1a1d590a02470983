# SPDX-License-Identifier: Apache-2.0
"""Plans of what each rank has of a batch: rows, keys and heads, as integers."""
