# SPDX-License-Identifier: Apache-2.0
"""Pickling of values of the core, through states from which the core makes them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import _core

State = tuple[Any, ...]


# Functions of Python, as pickle finds functions by name.
def attention_plan(state: State) -> _core.AttentionPlan:
    """Make a plan from its state; ValueError for an invalid state."""
    return _core.restore_attention_plan(state)


def context_parallel_metadata(state: State) -> _core.ContextParallelMetadata:
    """Make metadata from their state; ValueError for an invalid state."""
    return _core.restore_context_parallel_metadata(state)


def dsa_metadata(state: State) -> _core.DsaMetadata:
    """Make metadata from their state; ValueError for an invalid state."""
    return _core.restore_dsa_metadata(state)


def pcp_layout(state: State) -> _core.PCPLayout:
    """Make a layout from its state; ValueError for an invalid state."""
    return _core.restore_pcp_layout(state)


def shard_gather_plan(state: State) -> _core.ShardGatherPlan:
    """Make a plan from its state; ValueError for an invalid state."""
    return _core.restore_shard_gather_plan(state)


def _pickle_by_state(value_type: Any, restore: Callable[[State], Any]) -> None:
    value_type.__reduce__ = lambda self: (restore, (self._state(),))


_pickle_by_state(_core.AttentionPlan, attention_plan)
_pickle_by_state(_core.ContextParallelMetadata, context_parallel_metadata)
_pickle_by_state(_core.DsaMetadata, dsa_metadata)
_pickle_by_state(_core.PCPLayout, pcp_layout)
_pickle_by_state(_core.ShardGatherPlan, shard_gather_plan)
