# SPDX-License-Identifier: Apache-2.0
"""Check of disaggregated serving: compares decoded tokens with those of one process."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpattn.scheduling.request import Request

from ..dense.check import Checker, Pending, Prompt
from ..dsa.check import SparseChecker
from ..model import Head
from .decode import Continued

Array = npt.NDArray[Any]


class DecodeChecker(Checker):
    """Checks prompts like `Checker`, once their tokens are decoded, and then the tokens.

    One process computes the prompt and its decoded tokens at once. Each token must be the best one
    there; another token whose logit is lower by less than rounding explains is a near tie.

    If whole pages of a prompt swap places, the check passes, and rightly so: rotated keys include
    their positions, so the result of dense attention is unchanged.
    """

    def __init__(self, config: Any, *, block_tokens: int, rows_per_chunk: int) -> None:
        super().__init__(config, block_tokens=block_tokens, rows_per_chunk=rows_per_chunk)
        self._head = Head(config)
        self._prompts: dict[int, tuple[Request, Pending]] = {}
        self.num_tokens = 0
        self.num_wrong = 0
        self.num_near_ties = 0
        self.decode_error = 0.0  # error of hidden states of decoded tokens, as in `errors`
        # A difference of two logits has sqrt(2) times the deviation of a hidden state's error: the
        # rows of the head have unit length.
        self.margin = math.sqrt(2) * self.tolerance

    def _finish(self, prompts: list[Prompt]) -> None:
        """Keep the sampled rows of prompts until their tokens have arrived."""
        self._prompts |= {index: (request, pending) for index, request, pending in prompts}

    def compare_tokens(self, continued: Continued) -> None:
        """Compare a request with decoded tokens."""
        begin = time.perf_counter()
        request, pending = self._prompts.pop(continued.request_index)
        count, length = len(continued.tokens), request.input_length
        _, sampled, _, chosen = zip(*pending, strict=True)
        expected = self._reference(
            np.append(self._tokens_of(request), np.array(continued.tokens[:-1], np.int64)),
            np.concatenate([*sampled, np.arange(length, length + count - 1)]),
            np.vstack([*chosen, *continued.chosen]),
        )
        num_sampled = len(expected) - (count - 1)
        self._compare_rows(pending, expected[:num_sampled])
        decoded = expected[num_sampled - 1 :]  # the last token of a prompt is always sampled
        if count > 1:
            error = float(np.abs(continued.hidden - decoded[1:]).max())
            self.decode_error = max(self.decode_error, error if math.isfinite(error) else math.inf)
        self._compare_tokens(continued.tokens, self._head(torch.from_numpy(decoded)))
        self.seconds += time.perf_counter() - begin

    def _compare_tokens(self, tokens: list[int], logits: Tensor) -> None:
        behind = logits.max(dim=-1).values - logits[torch.arange(len(tokens)), tokens]
        wrong = behind > self.margin
        self.num_tokens += len(tokens)
        self.num_wrong += int(wrong.sum())
        self.num_near_ties += int((behind > 0).sum() - wrong.sum())


class SparseDecodeChecker(DecodeChecker, SparseChecker):
    """Check of decoding by sparse models, with the keys of decoded tokens."""
