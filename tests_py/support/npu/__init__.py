# SPDX-License-Identifier: Apache-2.0
"""Batches of the operators of Ascend NPUs."""
