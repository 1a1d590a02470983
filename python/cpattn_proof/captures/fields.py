# SPDX-License-Identifier: Apache-2.0
"""Required fields of records of each call, checked once, as files may come from anywhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from cpattn_terminal.limits import MAX_BATCH_TOKENS, MAX_INT, MAX_RANKS

#: Sizes of an attention plan, as cpattn.captures writes them.
PLAN_SIZES = ("page_size", "num_pages", "num_heads", "num_kv_heads", "head_dim", "v_head_dim")
_MOST_RANKS = 1 << 15  # of a plan
_MOST_BYTES = 1 << 62
_MOST_SEQUENCES = 1 << 20  # of a batch; plans of more take minutes
_MOST_SECONDS = 1e9


class Rule(NamedTuple):
    """Rule for a field, in words and as a function."""

    text: str
    holds: Callable[[Any], bool]


def fault_of(fields: Mapping[str, Any], rules: Mapping[str, Rule]) -> str | None:
    """Return the fault of the first field that breaks its rule, or None."""
    for name, rule in rules.items():
        if name not in fields:
            return f"has no {name!r}: read it with the release that recorded it"
        if not rule.holds(fields[name]):
            shown = _shown(fields[name])
            return f"{name} must be {rule.text}, got {shown}"
    return None


def _shown(value: Any) -> str:
    """Show a value in a message, cut to a readable length."""
    try:
        text = repr(value)
    except ValueError:  # from integers with thousands of digits
        return f"a very large {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_int(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _integer(low: int, high: int) -> Rule:
    return Rule(f"an int from {low} to {high}", lambda value: _is_int(value, low, high))


def _array(
    dimensions: int, low: int = -MAX_INT, most: int | None = None, longest: int | None = None
) -> Rule:
    """Make a rule for integer arrays from `low`: at most `longest`, in total at most `most`."""

    def holds(value: Any) -> bool:
        if not isinstance(value, np.ndarray) or value.ndim != dimensions:
            return False
        if longest is not None and value.size > longest:
            return False
        if not value.size:
            return True
        fits = low <= int(value.min()) and int(value.max()) <= MAX_INT
        return fits and (most is None or int(value.sum(dtype=np.int64)) <= most)

    together = "" if most is None else f", together at most {most}"
    many = "" if longest is None else f", {longest} of them at most"
    return Rule(
        f"an array of {dimensions} dimensions, ints from {low} to {MAX_INT}{together}{many}", holds
    )


def _or_none(rule: Rule) -> Rule:
    return Rule(f"{rule.text}, or null", lambda value: value is None or rule.holds(value))


def _list_of(rule: Rule) -> Rule:
    return Rule(
        f"a list, each {rule.text}",
        lambda value: isinstance(value, list) and all(map(rule.holds, value)),
    )


def _are_bytes_by_rank(value: Any) -> bool:
    return isinstance(value, dict) and all(
        key.isdecimal()
        and len(key) < 6
        and str(int(key)) == key
        and int(key) < MAX_RANKS
        and _is_int(size, 0, _MOST_BYTES)
        for key, size in value.items()
    )


def _is_time(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and -_MOST_SECONDS <= value <= _MOST_SECONDS


def _is_weight(value: Any) -> bool:
    return isinstance(value, float) and 0 < value < math.inf


_BOOL = Rule("true or false", lambda value: isinstance(value, bool))
_TEXT = Rule("a printable string", lambda value: isinstance(value, str) and value.isprintable())
_LENS = _array(1, 0, longest=_MOST_SEQUENCES)
_NEW_LENS = _array(1, 0, MAX_BATCH_TOKENS, _MOST_SEQUENCES)
_SIZE, _COUNT = _integer(1, MAX_INT), _integer(0, MAX_INT)
_RANKS, _RANK = _integer(1, _MOST_RANKS), _integer(0, _MOST_RANKS - 1)
_BYTES = Rule(f"bytes by the number of a rank below {MAX_RANKS}", _are_bytes_by_rank)

_SIDE = _or_none(_integer(0, (1 << 63) - 1))
_WINDOW = Rule(
    f"{_SIDE.text}, or two of them",
    lambda value: (
        _SIDE.holds(value)
        or (isinstance(value, list) and len(value) == 2 and all(map(_SIDE.holds, value)))
    ),
)

#: Rules of the first line.
HEADER = {"rank": _COUNT, "cpattn": _TEXT, "isa": _TEXT, "host": _TEXT}
#: Rules of every other line.
RECORD = {
    "call": _TEXT,
    "at": Rule("a number of seconds", _is_time),
    "seconds": Rule("a number of seconds from 0", lambda value: _is_time(value) and value >= 0),
}
#: Settings besides the number of ranks that decide how a batch is cut.
_SPLIT = {
    "strategy": _TEXT,
    "weights": _or_none(_list_of(Rule("a number above 0", _is_weight))),
    "cut_pages": _or_none(_SIZE),
}
_METADATA = {
    "extend_lens": _or_none(_NEW_LENS),
    "seq_lens": _or_none(_LENS),
    "num_tokens": _or_none(_integer(0, MAX_BATCH_TOKENS)),
    "kv_len_convention": _TEXT,
    "compat": _BOOL,
    "cp_rank": _or_none(_RANK),
    "cp_size": _RANKS,
    **_SPLIT,
    "digests": _list_of(_TEXT),
}
#: Rules of a `ContextParallel`; with sharded pools, the rank's share is there.
_PLANNED = {
    "cp_rank": _RANK,
    "cp_size": _RANKS,
    "page_size": _SIZE,
    "extend_lens": _NEW_LENS,
    "block_tables": _array(2),
    "slots": _array(1),
    "held_slots": _or_none(_array(1)),
    "held_keys": _or_none(_COUNT),
}
#: Rules by name of a call, for fields that a reader uses; other fields are not checked.
CALLS: Mapping[str, Mapping[str, Rule]] = {
    "plan_attention": {
        "q_lens": _NEW_LENS,
        "kv_lens": _LENS,
        "causal": _BOOL,
        "window": _WINDOW,
        "masked": _BOOL,
        "batch_invariant": _BOOL,
        "allow_short_kv": _BOOL,
        "page_ids": _array(1, 0),
        "page_indptr": _LENS,
        "digest": _TEXT,
        **dict.fromkeys(PLAN_SIZES, _COUNT),
    },
    "build_cp_metadata": _METADATA,
    "build_cp_metadata_all_ranks": _METADATA,
    "ContextParallel.plan": {
        **_PLANNED,
        "placement": _or_none(_TEXT),
        "seq_lens": _or_none(_LENS),
        "rows_per_rank": _list_of(_COUNT),
        **_SPLIT,
        "local_q_indices": _array(1, 0),
    },
    "ContextParallel.plan_decode": {**_PLANNED, "placement": _TEXT, "seq_lens": _LENS},
    "PCPManager._build_batch_layout": {
        "cp_rank": _RANK,
        "cp_size": _RANKS,
        "extend_lens": _NEW_LENS,
        "prefix_lens": _LENS,
        "segments": _array(2, 0),
    },
    "BlockTables.__init__": {
        "cp_rank": _RANK,
        "cp_size": _RANKS,
        "interleave": _SIZE,
        "block_sizes": _list_of(_SIZE),
        "dcp_sharded": _list_of(_BOOL),
    },
    "BlockTables.append_block_ids": {
        "request": _COUNT,
        "block_ids": _list_of(_list_of(_COUNT)),
        "overwrite": _BOOL,
    },
    "GPUModelRunner.prepare_attn": {
        "cp_rank": _RANK,
        "cp_size": _RANKS,
        "requests": _array(1, 0),
        "extend_lens": _NEW_LENS,
        "prefix_lens": _LENS,
        "local_seq_lens": _LENS,
    },
    "RowExchange.post": {
        "cp_rank": _RANK,
        "exchange": _TEXT,
        "sends": _BYTES,
        "receives": _BYTES,
    },
}
