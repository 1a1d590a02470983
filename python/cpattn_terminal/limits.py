# SPDX-License-Identifier: Apache-2.0
"""Largest numbers that commands accept, beyond which no machine exists or counts take minutes."""

from __future__ import annotations

from collections.abc import Sequence

MAX_INT = 2**31 - 1
MAX_RANKS = 4096
MAX_BATCH_TOKENS = 1 << 24  # new tokens: some arrays of a plan have an entry for each


def check_batch(
    lens_option: str, lens: Sequence[int], prefix_option: str, prefix: Sequence[int]
) -> None:
    """Raise ValueError if lists of a batch do not match, or if the batch is too large.

    Messages name the command-line options.
    """
    if len(lens) != len(prefix):
        raise ValueError(
            f"{prefix_option} must have as many elements as {lens_option}, {len(lens)}, "
            f"got {len(prefix)}"
        )
    if sum(lens) > MAX_BATCH_TOKENS:
        raise ValueError(
            f"{lens_option} must add up to at most {MAX_BATCH_TOKENS} tokens, got {sum(lens)}"
        )
    for new, cached in zip(lens, prefix, strict=True):
        if new + cached > MAX_INT:
            raise ValueError(
                f"{lens_option} and {prefix_option} must add up to at most {MAX_INT} tokens for "
                f"each sequence, got {new} + {cached}"
            )
