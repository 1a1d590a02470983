# SPDX-License-Identifier: Apache-2.0
"""Bugs of operators, which the conformance runner refutes."""
