# SPDX-License-Identifier: Apache-2.0
"""Bugs that integers refute: plans, lengths, tables, descriptors; a module for each kind."""
