# SPDX-License-Identifier: Apache-2.0
"""Audit of a run of the tests: what it did, what it left out, and what it left behind."""
