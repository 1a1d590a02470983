# SPDX-License-Identifier: Apache-2.0
"""Engine for requests of a model whose tokens ranks compute together."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...._arguments import at_least, integer
from ....context_parallel.placement_name import BY_PAGES, REPLICATED, PlacementName
from ....distributed import ContextParallel
from ....scheduling import hash_blocks
from ..._torch_threads import use_torch_threads
from .batches import Batches
from .identity import config_text, digest_of_weights
from .layers import ENGINE, RunningModel, layer_shapes
from .pools import make_pools
from .requests import Requests
from .sequences import (
    Chooser,
    Prefilled,
    Sequence,
    Stream,
    checked_config,
    checked_prompts,
    new_tokens,
)

SHARED = "shared"


class ContextParallelModel(Requests):
    """Causal language model of transformers whose prompts ranks compute together.

    Every rank has the whole model, and embeds, projects and runs the MLP of only its own tokens;
    keys and values go to KV pools, and attention runs over ranks. All ranks make the object and its
    calls with the same arguments, and get the same results. The part of a prompt whose K/V are in
    the pools, from this call or an earlier one, is not computed again.

    Parameters
    ----------
    model : PreTrainedModel
        Model on the CPU in `eval` mode, the same on every rank. Its layers must use transformers'
        attention functions; they are not changed.
    group : torch.distributed.ProcessGroup or DeviceMesh, optional
        Default: the default group. Its timeout bounds every wait for another rank.
    page_size : int
        Tokens per page of the pools, and granularity of shared prefixes.
    num_pages : int
        Pages of the pools, or of all ranks together if ranks share them.
    placement : str
        "replicated": every rank has all keys. "shared": every rank has all keys, in one pool per
        host. "page_interleave": a rank has every cp_size-th page. "token_interleave", or
        "token_interleave:16" for runs of 16: a rank has every cp_size-th token, or run.
    exchange : str
        Communication of queries and keys of sharded pools, as in `ContextParallel`.
    strategy, weights
        Distribution of a batch's tokens, and speed of each rank, as in `ContextParallel`.
    token_budget, max_sequences : int
        Most tokens of one batch, and most requests in progress; longer prompts are computed in
        chunks.

    Attributes
    ----------
    model, placement : as given
    cp : cpattn.distributed.ContextParallel
    cache : cpattn.scheduling.PrefixCache
        Owner of the pages.
    hit_tokens : int
        Number of prompt tokens so far whose K/V were in the pools.

    Raises
    ------
    TypeError
        If sizes are no integers.
    ValueError
        If the model is not supported (such as encoder-decoders, layers with a state, images, and
        tensor-parallel weights), a name is unknown, or `ContextParallel` refuses an argument.
    RuntimeError
        If ranks have different models, releases or arguments (named in the message), or a rank does
        not answer.

    Examples
    --------
    >>> model = AutoModelForCausalLM.from_pretrained(folder)  # doctest: +SKIP
    >>> engine = ContextParallelModel(model)  # doctest: +SKIP
    >>> engine.generate([[1, 15043], [1, 306, 763]], max_new_tokens=32)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any,
        group: Any = None,
        *,
        page_size: int = 16,
        num_pages: int = 4096,
        placement: str = REPLICATED,
        exchange: str = "auto",
        strategy: str = "zigzag",
        weights: SequenceOf[float] | None = None,
        token_budget: int = 2048,
        max_sequences: int = 64,
    ) -> None:
        named = PlacementName.parse(REPLICATED if placement == SHARED else placement)
        if named is None:
            raise ValueError(
                f"{ENGINE}: placement must be replicated, shared, page_interleave, "
                f"token_interleave or token_interleave:I, got {placement!r:.40}"
            )
        at_least(1, num_pages, ENGINE, "num_pages")
        group = dist.group.WORLD if group is None else group
        if group is None:
            raise ValueError(f"{ENGINE}: group must be given, or init_process_group called before")
        size = group.size()
        self.model, self.placement = model, placement
        self.cp = cp = ContextParallel(
            group,
            strategy=strategy,
            weights=weights,
            page_size=page_size,
            placement=named.over(size, page_size),
            exchange=exchange,
        )
        with cp.agreement() as values:
            options = page_size, num_pages, placement, exchange, token_budget, max_sequences
            speeds = () if weights is None else tuple(map(float, weights))
            values[f"arguments of {ENGINE}"] = *options, *speeds
            values["release of transformers"] = version("transformers")
            values["config of the model"] = config_text(model)
            shapes = layer_shapes(model)
            values["weights"] = digest_of_weights(model)
            pages = named.whole_pages(num_pages, size)
            self._cache_options = {
                "num_pages": pages,
                "page_size": page_size,
                "block_tokens": page_size,
                "shard_size": size if named.kind == BY_PAGES else 1,
            }
            self._scheduler_options = {"token_budget": token_budget, "max_sequences": max_sequences}
            self._begin()
            use_torch_threads()
        self._pools = make_pools(
            cp, shapes, named.rank_pages(pages, size, page_size), shared=placement == SHARED
        )
        self._batches = Batches(RunningModel(model), cp, self._pools, placement == SHARED)
        self._num_requests = 0
        self.hit_tokens = 0

    def __repr__(self) -> str:
        return (
            f"{ENGINE}({type(self.model).__name__}, rank {self.cp.cp_rank} of {self.cp.cp_size}, "
            f"{self.placement}, {self.cache.num_pages} pages of {self.cp.page_size} tokens, "
            f"{self._pools.nbytes / 2**30:.3g} GiB here)"
        )

    def generate(
        self,
        prompts: SequenceOf[Any],
        generation_config: Any = None,
        *,
        streamer: Any = None,
        logits_processor: SequenceOf[Any] | None = None,
        stopping_criteria: SequenceOf[Any] | None = None,
        tokenizer: Any = None,
        seed: int = 0,
        return_logprobs: bool = False,
        **options: Any,
    ) -> Any:
        """Generate tokens for all prompts together, each as if it were alone.

        Parameters
        ----------
        prompts : list of lists of int
            Token ids of prompts of any lengths.
        generation_config : GenerationConfig, optional
            Config as for ``model.generate``, greedy or sampling, with logits processors, stop
            tokens and strings. Default: the config of the model.
        streamer : optional
            Receiver for one prompt, as for ``model.generate``: ``put`` gets the prompt, then each
            token as it comes, and ``end`` follows the last token. Ranks may have different
            streamers or none; an error of a streamer is raised after all tokens are there.
        logits_processor, stopping_criteria : sequences, tokenizer : optional
            See ``model.generate``; called with one sequence at a time, on one of the ranks.
        seed : int
            Seed of sampling. Tokens of a prompt depend only on the seed, the prompt and its place
            among `prompts`.
        return_logprobs : bool
            Whether to return the log-probabilities of the tokens, too.
        **options
            Options of `GenerationConfig`, such as ``max_new_tokens`` and ``do_sample``.

        Returns
        -------
        tokens : list of lists of int
            New tokens of each prompt, including a stop token; the same on every rank.
        logprobs : list of lists of float; only with ``return_logprobs``
            Log-probabilities by the model's logits before processing.

        Raises
        ------
        TypeError
            If `GenerationConfig` does not know an option.
        ValueError
            If a prompt is no list of tokens of the model or does not fit into the pools, or the way
            of generating needs several sequences, such as beams.
        RuntimeError
            If ranks have different arguments, or a rank does not answer or fails in the model or in
            a processor; the message names the rank. All requests and cached tokens are then gone,
            but the engine stays usable unless a rank did not answer.

        Examples
        --------
        >>> engine.generate([[1, 2, 3]], max_new_tokens=4)  # doctest: +SKIP
        [[11, 7, 7, 2]]
        """
        with self.cp.agreement() as values:
            found = checked_prompts("generate", prompts, self._vocab_size)
            if streamer is not None and len(found) != 1:
                raise ValueError(
                    f"{ENGINE}.generate: a streamer needs one prompt, got {len(found)}"
                )
            self._refuse_others("generate")
            config = checked_config(self.model, "generate", generation_config, options)
            values["prompts"] = tuple(hash_blocks(prompt, len(prompt)) for prompt in found)
            values["generation_config"] = config.to_json_string(), seed
            self.model._prepare_special_tokens(config, batch_size=1, device="cpu")
            extras = logits_processor, stopping_criteria, tokenizer
            sequences = [
                self._sequence("generate", prompt, config, f"{seed} {i}", *extras)
                for i, prompt in enumerate(found)
            ]
        numbers = {self._add(sequence): i for i, sequence in enumerate(sequences)}
        logprobs: list[list[float]] = [[] for _ in sequences]
        stream = Stream(streamer)
        for prompt in found:
            stream.put(torch.from_numpy(prompt)[None])
        try:
            while any(number in self._sequences for number in numbers):
                for new in self.step():
                    if new.request in numbers:
                        logprobs[numbers[new.request]].append(new.logprob)
                        stream.put(torch.tensor([new.token]))
        finally:
            self.free(numbers)
        stream.end()
        tokens = [s.tokens[s.num_prompt_tokens :].tolist() for s in sequences]
        return (tokens, logprobs) if return_logprobs else tokens

    def submit(
        self,
        prompt: Any,
        generation_config: Any = None,
        *,
        logits_processor: SequenceOf[Any] | None = None,
        stopping_criteria: SequenceOf[Any] | None = None,
        tokenizer: Any = None,
        seed: int = 0,
        **options: Any,
    ) -> int:
        """Queue a request, whose tokens ``step`` generates. Local.

        Parameters
        ----------
        prompt : list of int
        generation_config, logits_processor, stopping_criteria, tokenizer, seed, **options
            See ``generate``; all ranks submit the same requests in the same order.

        Returns
        -------
        int
            Number of the request, for ``free``.

        Raises
        ------
        TypeError, ValueError
            See ``generate``.
        """
        (found,) = checked_prompts("submit", [prompt], self._vocab_size)
        config = checked_config(self.model, "submit", generation_config, options)
        self.model._prepare_special_tokens(config, batch_size=1, device="cpu")
        extras = logits_processor, stopping_criteria, tokenizer
        return self._add(self._sequence("submit", found, config, f"{seed} 0", *extras))

    def prefill(self, prompts: SequenceOf[Any], *, max_new_tokens: int = 0) -> Prefilled:
        """Compute prompts whose next tokens the caller chooses.

        Parameters
        ----------
        prompts : list of lists of int
        max_new_tokens : int
            Most tokens that ``decode`` may add to each prompt.

        Returns
        -------
        Prefilled
            Numbers of the requests, and the logits after their last tokens, the same on every rank.
            Requests hold their pages until ``free``.

        Raises
        ------
        ValueError, RuntimeError
            As for ``generate``; also if requests of ``submit`` are in progress, or other requests
            hold pages that the prompts need.
        """
        with self.cp.agreement() as values:
            found = checked_prompts("prefill", prompts, self._vocab_size)
            values["prompts"] = tuple(hash_blocks(prompt, len(prompt)) for prompt in found)
            values["max_new_tokens"] = at_least(
                0, max_new_tokens, f"{ENGINE}.prefill", "max_new_tokens"
            )
            self._refuse_others("prefill")
            held = self.cache.num_pages - self.cache.num_free_pages - self.cache.num_idle_pages
            self._check_pages("prefill", *(len(p) + max_new_tokens for p in found), held=held)
            if len(found) + len(self._sequences) > self._scheduler.max_sequences:
                raise ValueError(
                    f"{ENGINE}.prefill: {len(found)} prompts besides {len(self._sequences)} "
                    f"requests are more than max_sequences, {self._scheduler.max_sequences}"
                )
        requests = [self._add(Sequence(prompt, max_new_tokens, None)) for prompt in found]
        logits: dict[int, Tensor] = {}
        try:
            while len(logits) < len(requests):
                if (batch := self._scheduler.next_batch()) is None:
                    raise self._others_hold("prefill")
                logits |= self._compute(batch)[1]
        except BaseException:
            self.free(requests)
            raise
        return Prefilled(requests, self._rows(logits, requests))

    def decode(self, tokens: Mapping[int, int]) -> Tensor:
        """Compute one more token of requests of ``prefill``.

        Parameters
        ----------
        tokens : dict of int
            Next token of each request.

        Returns
        -------
        float tensor [len(tokens), vocab_size]
            Logits after these tokens, in their order, the same on every rank.

        Raises
        ------
        TypeError
            If a token is no integer.
        ValueError
            If a number is no request of ``prefill``, the model lacks a token, or `max_new_tokens`
            of ``prefill`` is exceeded.
        RuntimeError
            As for ``step``; also if ranks have different tokens.
        """
        with self.cp.agreement() as values:
            self._refuse_others("decode")
            found = {}
            for number, token in tokens.items():
                sequence = self._sequences.get(number)
                if sequence is None or sequence.chooser or sequence.is_full:
                    raise ValueError(
                        f"{ENGINE}.decode: requests must be of prefill, with room for another of "
                        f"its max_new_tokens, got {number}"
                    )
                found[number] = integer(token, f"{ENGINE}.decode", f"tokens[{number}]")
                if not 0 <= found[number] < self._vocab_size:
                    raise ValueError(
                        f"{ENGINE}.decode: tokens must be in [0, {self._vocab_size}), got {token}"
                    )
            values["tokens"] = tuple(found.items())
        for number, token in found.items():
            self._sequences[number].append(token)
        batch = self._scheduler.next_batch(found)
        logits = self._compute(batch)[1] if batch else {}
        return self._rows(logits, found)

    def _sequence(self, call: str, prompt: Any, config: Any, seed: str, *extras: Any) -> Sequence:
        """Return a sequence with its own sampling, for a prompt that fits."""
        number = new_tokens(self.model, config, prompt)
        if number < 1:
            raise ValueError(
                f"{ENGINE}.{call}: max_new_tokens must be positive, got {number} behind a prompt "
                f"of {len(prompt)}"
            )
        self._check_pages(call, len(prompt) + number - 1)
        return Sequence(prompt, number, Chooser(self.model, config, prompt, number, seed, *extras))
