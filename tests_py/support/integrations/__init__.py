# SPDX-License-Identifier: Apache-2.0
"""Calls and batches of the integrations."""
