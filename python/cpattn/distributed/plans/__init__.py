# SPDX-License-Identifier: Apache-2.0
"""Who has which rows, keys and heads of a batch: integers."""
