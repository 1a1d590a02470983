# SPDX-License-Identifier: Apache-2.0
"""Bugs that the simulation of all ranks refutes: calls that differ, rows that no rank gets."""
