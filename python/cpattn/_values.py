# SPDX-License-Identifier: Apache-2.0
"""Pickling of the values that the core makes: by a state, from which they are made again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import _core

State = tuple[Any, ...]


# Functions of Python, because pickle finds them by their names.
def attention_plan(state: State) -> _core.AttentionPlan:
    """The plan of a state; ValueError for a state that no plan has."""
    return _core.restore_attention_plan(state)


def context_parallel_metadata(state: State) -> _core.ContextParallelMetadata:
    """The metadata of a state; ValueError for a state that none has."""
    return _core.restore_context_parallel_metadata(state)


def dsa_metadata(state: State) -> _core.DsaMetadata:
    """The metadata of a state; ValueError for a state that none has."""
    return _core.restore_dsa_metadata(state)


def pcp_layout(state: State) -> _core.PCPLayout:
    """The layout of a state; ValueError for a state that none has."""
    return _core.restore_pcp_layout(state)


def shard_gather_plan(state: State) -> _core.ShardGatherPlan:
    """The plan of a state; ValueError for a state that no plan has."""
    return _core.restore_shard_gather_plan(state)


def _pickle_by_state(value_type: Any, restore: Callable[[State], Any]) -> None:
    value_type.__reduce__ = lambda self: (restore, (self._state(),))


_pickle_by_state(_core.AttentionPlan, attention_plan)
_pickle_by_state(_core.ContextParallelMetadata, context_parallel_metadata)
_pickle_by_state(_core.DsaMetadata, dsa_metadata)
_pickle_by_state(_core.PCPLayout, pcp_layout)
_pickle_by_state(_core.ShardGatherPlan, shard_gather_plan)
