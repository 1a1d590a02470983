# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's ALiBi: slope * (j - i) is added to the score of new token i and key j."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..._types import AnyTensor
from .._visibility import Lengths
from ._merge import LOG2E


def slopes_of(num_heads: int) -> AnyTensor:
    """Return the slope of each head, which FlashInfer fixes."""
    import torch

    powers = 1 << (num_heads.bit_length() - 1)  # heads before the last power of two
    head = torch.arange(1, num_heads + 1, dtype=torch.float64)
    step = torch.where(head <= powers, head, head - powers - 0.5)
    return (2 ** (-8 * step / powers)).float()


def alibi(
    num_heads: int, q_lens: Lengths, kv_lens: Lengths, *, sees_ahead: bool
) -> tuple[dict[str, Any], AnyTensor]:
    """Return the biases of `run_attention`, and the terms missing from the LSE, to base 2.

    cpattn counts from the token's own key, FlashInfer from the token's place among the new tokens;
    the weights are the same. Keys ahead of a token have positive biases, which need a table.
    """
    import torch

    slopes = slopes_of(num_heads)
    apart = np.repeat(kv_lens - q_lens, q_lens)
    missing = torch.from_numpy(apart)[:, None] * (LOG2E * slopes)
    if not sees_ahead:
        return {"alibi_slopes": slopes}, missing
    most = int(max(q_lens.max(initial=0), kv_lens.max(initial=0)))
    return {"relative_bias": slopes[:, None] * torch.arange(-most, most + 1)}, missing
