# SPDX-License-Identifier: Apache-2.0
"""Random cases for functions that have a twin in sglang, and when both refuse alike."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

#: What has no result, and the exceptions that say so: upstream's, some by accident, and ours.
REFUSALS = {
    "refused: no source entries": {
        ZeroDivisionError: "modulo by zero",
        ValueError: "^get_mha_kv_ptrs_with_pp: source must have an entry of K and one of V",
    },
    "refused: unequal lengths": {
        ValueError: "^group_concurrent_contiguous requires equal-length src/dst index arrays"
    },
    "refused: short destination": {  # by releases that went on for as long as it is
        IndexError: "list index out of range"
    },
}


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result, or why there is none. An exception of any other kind or wording is a failure."""
    try:
        return function(*args, **kwargs)
    except (ValueError, IndexError, ZeroDivisionError) as error:
        for reason, exceptions in REFUSALS.items():
            if re.search(exceptions.get(type(error), "$^"), str(error)):
                return reason
        raise


def knows_drafts(sglang: SimpleNamespace) -> bool:
    """Return whether stages with several groups of buffers are told their draft layers."""
    rule = sglang.ascend.AscendKVManager.get_mla_kv_ptrs_with_pp
    return "draft_kv_layers" in rule.__code__.co_consts


def random_stage(rng: np.random.Generator) -> tuple[int, range]:
    """A model's number of layers, and those that one pipeline stage has."""
    num_layers = int(rng.integers(1, 24))
    start = int(rng.integers(0, num_layers))
    return num_layers, range(start, int(rng.integers(start, num_layers)) + 1)
