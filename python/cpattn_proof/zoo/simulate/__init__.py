# SPDX-License-Identifier: Apache-2.0
"""Bugs that running all ranks refutes: calls that differ, rows that nobody gets."""
