# SPDX-License-Identifier: Apache-2.0
"""Bugs that the linter refutes by integers, one module per kind: plans, lengths, tables, ..."""
