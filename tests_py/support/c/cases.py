# SPDX-License-Identifier: Apache-2.0
"""Prints the header with expected results for the test in C: the oracle's, in float64, for inputs
by a rule that C follows, too."""

import numpy as np
import torch

from support.cases import expected_attention
from support.places import ROOT
from support.tolerances import allowed_error, allowed_lse_error

HEADER = ROOT / "tests_cpp" / "c" / "expected.h"
BATCH = {"q_lens": [3, 1], "kv_lens": [5, 9], "block_tables": [[5, 0, -1], [2, 4, 1]]}
OPTIONS = {"plain": {}, "options": {"scale": 0.7, "window": (3, None), "softcap": 5.0}}
SEEDS = {"plain": {}, "options": {"sinks": 4, "alibi_slopes": 5}}


def numbers(seed: int, *shape: int) -> torch.Tensor:
    """Return multiples of 1/500 from -2 to 2."""
    i = np.arange(np.prod(shape), dtype=np.int64)
    values = ((i * 7919 + seed * 104729) % 2001 - 1000) / 500
    return torch.from_numpy(values.astype(np.float32).reshape(shape))


def results(name: str) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Return the oracle's results of a case, and the largest allowed errors."""
    inputs = {
        "q": numbers(1, 4, 4, 8),
        "k_cache": numbers(2, 6, 4, 2, 8),
        "v_cache": numbers(3, 6, 4, 2, 8),
        **BATCH,
        **OPTIONS[name],
        **{key: numbers(seed, 4) for key, seed in SEEDS[name].items()},
    }
    exact = expected_attention(inputs)
    softcap = inputs.get("softcap", 0.0)
    allowed = allowed_error(exact, "float32", softcap=softcap).max()
    return exact.out, exact.lse, allowed, allowed_lse_error(exact, "float32", softcap).max()


def table(name: str, values: np.ndarray) -> str:
    rows = values.reshape(-1, 4)
    lines = ",\n".join("    " + ", ".join(f"{x:.12g}" for x in row) for row in rows)
    return f"static const double {name}[{values.size}] = {{\n{lines}\n}};\n"


def header() -> str:
    text = "/* SPDX-License-Identifier: Apache-2.0 */\n"
    text += "/* Printed by `python -m support.c.cases` from the float64 oracle. */\n"
    text += "/* clang-format off */\n"
    for name in OPTIONS:
        out, lse, error, lse_error = results(name)
        text += table(f"{name}_out", out) + table(f"{name}_lse", lse)
        text += (
            f"static const double {name}_error = {error:.2g}, {name}_lse_error = {lse_error:.2g};\n"
        )
    return text


if __name__ == "__main__":
    print(header(), end="")
