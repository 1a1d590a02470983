# SPDX-License-Identifier: Apache-2.0
"""Replays without processes, and their models."""
