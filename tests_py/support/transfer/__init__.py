# SPDX-License-Identifier: Apache-2.0
"""Pools, sides and fleets of a transfer, and processes that take part in one."""
