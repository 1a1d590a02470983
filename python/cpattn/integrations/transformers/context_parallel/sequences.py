# SPDX-License-Identifier: Apache-2.0
"""Sequences of an engine, and the choice of the next token of each."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from copy import copy
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .layers import ENGINE

Tokens = NDArray[np.int64]

#: Options that need more than the logits of one sequence, and their allowed values.
_MORE = {
    "num_beams": 1, "num_return_sequences": 1, "guidance_scale": 1, "penalty_alpha": 0,
    "prompt_lookup_num_tokens": 0, "assistant_early_exit": 0, "dola_layers": 0, "max_time": 0,
    "use_mtp": False, "constraints": 0, "force_words_ids": 0, "token_healing": False,
}  # fmt: skip
_DEFAULT_LENGTH = 20  # new tokens in ``model.generate`` if no length was ever set


class NewToken(NamedTuple):
    """Token that `ContextParallelModel.step` has added to a request.

    Attributes
    ----------
    request : int
        Number of the request.
    token : int
    logprob : float
        Natural log-probability by the model's logits before processing.
    finished : bool
        Whether it is the last token; the request has then ended.

    Examples
    --------
    >>> NewToken(request=0, token=11, logprob=-0.5, finished=False).token
    11
    """

    request: int
    token: int
    logprob: float
    finished: bool


class Prefilled(NamedTuple):
    """Requests whose prompts are in the pools, and the logits after the prompts.

    Attributes
    ----------
    requests : list of int
        Numbers for `ContextParallelModel.decode` and `ContextParallelModel.free`.
    logits : float tensor [len(requests), vocab_size]

    Examples
    --------
    >>> requests, logits = engine.prefill(prompts)  # doctest: +SKIP
    """

    requests: list[int]
    logits: Tensor


class Chooser:
    """Choice of the next tokens of one sequence, as in ``model.generate``.

    A sampled token depends only on the seed and its position, not on other sequences or ranks.
    """

    def __init__(
        self,
        model: Any,
        config: Any,
        prompt: Tokens,
        max_new_tokens: int,
        seed: str,
        processors: SequenceOf[Any] | None,
        criteria: SequenceOf[Any] | None,
        tokenizer: Any,
    ) -> None:
        from transformers import LogitsProcessorList, StoppingCriteriaList

        config = copy(config)
        config.max_length = len(prompt) + max_new_tokens
        self._sample, self._seed = bool(config.do_sample), seed
        self._processors = model._get_logits_processor(
            config, input_ids_seq_length=len(prompt),
            encoder_input_ids=torch.from_numpy(prompt)[None],
            logits_processor=LogitsProcessorList(processors or ()), device="cpu", model_kwargs={},
        )  # fmt: skip
        self._criteria = model._get_stopping_criteria(
            config, StoppingCriteriaList(criteria or ()), tokenizer
        )

    def choose(self, tokens: Tokens, logits: Tensor) -> tuple[int, float, bool]:
        """Return the token after `tokens`, its log-probability, and whether it is the last."""
        ids = torch.from_numpy(tokens)[None]
        logits = logits.float()
        scores: Tensor = self._processors(ids, logits[None].clone())[0]
        if self._sample:
            key = blake2b(f"{self._seed} {len(tokens)}".encode(), digest_size=7).digest()
            drawn = torch.Generator().manual_seed(int.from_bytes(key, "little"))
            token = int(torch.multinomial(scores.softmax(-1), 1, generator=drawn))
        else:
            token = int(scores.argmax())
        logprob = float(logits[token] - logits.logsumexp(-1))
        after = torch.cat([ids, torch.tensor([[token]])], 1)
        return token, logprob, bool(self._criteria(after, scores[None]).all())


class Sequence:
    """Tokens of one request: a prompt, and a limited number of new tokens."""

    def __init__(self, prompt: Tokens, max_new_tokens: int, chooser: Chooser | None) -> None:
        self._tokens = np.empty(len(prompt) + max_new_tokens, np.int64)
        self._tokens[: len(prompt)] = prompt
        self.num_prompt_tokens = self.num_tokens = len(prompt)
        self.max_new_tokens = max_new_tokens
        self.num_computed = 0  # tokens whose K/V are in the pools
        self.chooser = chooser

    @property
    def tokens(self) -> Tokens:
        """All known tokens."""
        return self._tokens[: self.num_tokens]

    @property
    def is_full(self) -> bool:
        """Whether no other token may follow."""
        return self.num_tokens == len(self._tokens)

    @property
    def is_ready(self) -> bool:
        """Whether its prompt is computed, and a known token after it is not."""
        return self.num_prompt_tokens <= self.num_computed < self.num_tokens

    def append(self, token: int) -> None:
        """Add a token, for which there is room."""
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1


class Stream:
    """Streamer of a call, or None; its error is raised last, as other ranks must go on."""

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._error: Exception | None = None

    def put(self, tokens: Tensor) -> None:
        """Hand on tokens."""
        if self._streamer is not None and self._error is None:
            try:
                self._streamer.put(tokens)
            except Exception as error:
                self._error = error

    def end(self) -> None:
        """End the stream; return the first error of the streamer."""
        if self._error is not None:
            raise self._error
        if self._streamer is not None:
            self._streamer.end()


def checked_prompts(call: str, prompts: Any, vocab_size: int) -> list[Tokens]:
    """Return prompts as arrays; TypeError or ValueError for an invalid prompt."""
    found = []
    for i, prompt in enumerate(prompts):
        ids = np.asarray(prompt)
        if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
            raise ValueError(
                f"{ENGINE}.{call}: prompts[{i}] must be a list of at least one token, got "
                f"{type(prompt).__name__} of shape {list(ids.shape)}, {ids.dtype}"
            )
        if not 0 <= ids.min() <= ids.max() < vocab_size:
            raise ValueError(
                f"{ENGINE}.{call}: tokens of prompts[{i}] must be in [0, {vocab_size}), got "
                f"{ids.min()} to {ids.max()}"
            )
        found.append(ids.astype(np.int64))
    return found


def checked_config(model: Any, call: str, given: Any, options: dict[str, Any]) -> Any:
    """Return the `GenerationConfig` of a call, made from its arguments as in ``model.generate``.

    Its `max_length` is None if it was never set.
    """
    config, unknown = model._prepare_generation_config(given, **options)
    for name in ("output_attentions", "output_hidden_states"):
        unknown.pop(name, None)
    if unknown:
        raise TypeError(f"{ENGINE}.{call}: there is no argument {', '.join(sorted(unknown))}")
    for name, none in _MORE.items():
        value = getattr(config, name, None)
        if value is not None and value != none and value:
            raise ValueError(f"{ENGINE}.{call}: {name} is not supported, got {value!r:.40}")
    lengths = [getattr(one, "max_length", None) for one in (given, model.generation_config)]
    if [*lengths, options.get("max_length")] == [None] * 3:
        config.max_length = None
    return config


def new_tokens(model: Any, config: Any, prompt: Tokens) -> int:
    """Return how many tokens may follow a prompt, by the lengths of a checked config."""
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    if config.max_length is not None:
        return int(config.max_length) - len(prompt)
    most = getattr(model.config, "max_position_embeddings", None)
    return _DEFAULT_LENGTH if most is None else min(_DEFAULT_LENGTH, most - len(prompt))
