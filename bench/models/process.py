# SPDX-License-Identifier: Apache-2.0
"""A peer: transformers in this process, or an engine whose other ranks it starts.

    python -m bench.models.process '{"kind": "engine", "size": 2, ...}' [rank store host]

Rank 0 is asked over its pipes, and makes the others do the same.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers
import uvicorn

import cpattn
from bench.harness import worker
from bench.harness.figures import Row
from bench.serving.model import VOCABULARY
from cpattn.integrations import transformers as integration
from cpattn.integrations.transformers import ContextParallelModel
from cpattn.integrations.transformers.context_parallel import passes
from cpattn_lab.processes.hosts import INTERFACE, Hosts, enter

ROOT = Path(__file__).parents[2]
TOP = 8  # log probabilities that are compared
PREFIX = 1_000_000  # seed of tokens that are cached


def tokens_of(length: int, seed: int) -> list[int]:
    """Random tokens with a beginning of their own."""
    return random.Random(f"{length} {seed}").choices(range(1, VOCABULARY), k=length)


def answers_of(logits: torch.Tensor) -> list[Row]:
    """Tokens that follow, and log probabilities of the best, in the form of `compare_tokens`."""
    best = logits.float().log_softmax(-1).topk(TOP)
    return [
        {"tokens": [tokens[0]], "best": [dict(zip(tokens, logprobs, strict=True))]}
        for tokens, logprobs in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


class Alone:
    """A model of transformers with one of its attention functions."""

    version = transformers.__version__

    def __init__(self, folder: str, dtype: str, attention: str) -> None:
        integration.register()
        self._model = load(folder, dtype)
        self._model.set_attn_implementation(attention)
        self._staged: dict[tuple[int, int], Any] = {}

    def prefill(self, new: int, cached: int, seed: int) -> Row:
        """Seconds of one prompt behind cached tokens."""
        cache = self._behind(1, cached)
        ids = torch.tensor([tokens_of(new, seed)])
        seconds, logits = timed(lambda: self._run(ids, cache))
        kept = sum(2 * layer.keys.nbytes for layer in cache.layers)
        cache.crop(-new)
        return {"seconds": seconds, "answers": answers_of(logits), "kept": [kept]}

    def decode(self, batch: int, cached: int, steps: int, seed: int) -> Row:
        """Median seconds of a step of a batch of sequences."""
        cache = self._behind(batch, cached)
        ids = torch.tensor([tokens_of(batch, seed + step) for step in range(steps)])

        taken = [timed(partial(self._run, step[:, None], cache)) for step in ids]
        cache.crop(-steps)
        return step_of(taken)

    def _behind(self, batch: int, cached: int) -> Any:
        """Return the cache of some tokens of each sequence, computed once."""
        if not cached:
            return transformers.DynamicCache(config=self._model.config)
        if (batch, cached) not in self._staged:
            cache = transformers.DynamicCache(config=self._model.config)
            self._run(torch.tensor([tokens_of(cached, PREFIX + i) for i in range(batch)]), cache)
            self._staged = {(batch, cached): cache}
        return self._staged[batch, cached]

    def _run(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self._model(ids, past_key_values=cache, logits_to_keep=1).logits
        return logits[:, 0]


class Engine:
    """A rank of an engine; all ranks make the same calls."""

    version = transformers.__version__

    def __init__(self, folder: str, dtype: str, num_pages: int, placement: str) -> None:
        self._model = load(folder, dtype)
        self._engine = ContextParallelModel(self._model, num_pages=num_pages, placement=placement)

    def prefill(self, new: int, cached: int, seed: int) -> Row:
        """Seconds of one prompt behind cached tokens, and the memory of each rank's pools."""
        prefix = tokens_of(cached, PREFIX)
        if cached:
            self._engine.free(self._engine.prefill([prefix]).requests)
        hits = self._engine.hit_tokens
        prompt = [prefix + tokens_of(new, seed)]
        seconds, (requests, logits) = timed(lambda: self._engine.prefill(prompt))
        assert self._engine.hit_tokens - hits == cached
        self._engine.free(requests)
        layers = range(self._model.config.num_hidden_layers)
        caches = [cache for layer in layers for cache in self._engine._pools.caches(layer)]
        kept = of_all_ranks(sum(resident_bytes(cache) for cache in caches if cache is not None))
        return {"seconds": seconds, "answers": answers_of(logits), "kept": kept}

    def decode(self, batch: int, cached: int, steps: int, seed: int) -> Row:
        """Median seconds of a step of a batch of requests."""
        prompts = [tokens_of(cached, PREFIX + i) for i in range(batch)]
        requests, _ = self._engine.prefill(prompts, max_new_tokens=steps)
        ids = [tokens_of(batch, seed + step) for step in range(steps)]
        tokens = [dict(zip(requests, step, strict=True)) for step in ids]
        taken = [timed(partial(self._engine.decode, step)) for step in tokens]
        self._engine.free(requests)
        return step_of(taken)

    def rest(self, rows: int) -> Row:
        """Seconds of a pass without attention over some rows, on the slowest rank."""
        from cpattn.integrations.transformers.context_parallel.layers import RunningModel

        ids = torch.tensor(tokens_of(rows, 0))
        model, last = RunningModel(self._model), torch.tensor([rows - 1])
        return slowest(lambda: model.logits(_Zeros(), ids, torch.arange(rows), last), 3)

    def rest_of_step(self, batch: int) -> Row:
        """Seconds of a decode step without attention, with all that the engine does around it."""
        requests, _ = self._engine.prefill([[1]] * batch, max_new_tokens=17)
        with ExitStack() as stack:
            for kind in (passes.SharedOut, passes.OnEveryRank, passes.OverShards):
                stack.enter_context(patch.object(kind, "attend", _zeros))
            rest = slowest(lambda: self._engine.decode(dict.fromkeys(requests, 1)), 15)
        self._engine.free(requests)
        return rest

    def serve(self, load: str) -> Row:
        """Serve a load by the server of examples/; return what its clients measured."""
        from examples import serve_over_ranks as example

        self._engine.generate([tokens_of(64, PREFIX)], max_new_tokens=4, do_sample=False)
        hits, loop = self._engine.hit_tokens, example.Loop(self._engine)
        if dist.get_rank():
            loop.run()
            return {}
        with closing(socket.socket()) as listening:
            listening.bind(("127.0.0.1", 0))
            port = listening.getsockname()[1]
            face = example.Completions(loop, Numbers(), "model")
            server = uvicorn.Server(uvicorn.Config(face.app, log_level="warning"))
            threading.Thread(target=server.run, args=([listening],), daemon=True).start()
            command = [sys.executable, "-m", "bench.models.clients", str(port), load]
            clients = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)

            def until_they_leave() -> bytes:
                told, _ = clients.communicate()
                loop.stopping = True
                return told  # nothing, if they failed

            with ThreadPoolExecutor(1) as waiting:
                told = waiting.submit(until_they_leave)
                loop.run()
            server.should_exit = True
            return json.loads(told.result()) | {"hit_tokens": self._engine.hit_tokens - hits}


class Numbers:
    """A tokenizer whose words are the numbers of the tokens."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return " ".join(map(str, tokens))


class _Zeros:
    """Attention that takes no time, in which ranks meet as they do to exchange rows."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, options: Any
    ) -> torch.Tensor:
        if dist.get_world_size() > 1:
            dist.barrier()
        return torch.zeros_like(q)


def _zeros(a_pass: Any, layer: int, q: torch.Tensor, *others: Any) -> torch.Tensor:
    """Attention of a decode step, without a meeting of ranks, which the model counts."""
    return torch.zeros_like(q)


class Leader:
    """Rank 0, which passes each command on to the others."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.version = engine, engine.version

    def __getattr__(self, do: str) -> Callable[..., Row]:
        def all_ranks(**arguments: Any) -> Row:
            dist.broadcast_object_list([do, arguments])
            answer: Row = getattr(self._engine, do)(**arguments)
            return answer

        return all_ranks


def follow(engine: Engine) -> None:
    """Follow the commands of rank 0, until it ends."""
    while True:
        asked: list[Any] = [None, None]
        dist.broadcast_object_list(asked)
        with suppress(Exception):  # rank 0 says it
            getattr(engine, asked[0])(**asked[1])


def resident_bytes(cache: torch.Tensor) -> int:
    """Bytes of the pages of a cache that were ever written."""
    size = os.sysconf("SC_PAGESIZE")
    begin = cache.data_ptr() // size * size
    pages = (ctypes.c_ubyte * -(-(cache.data_ptr() + cache.nbytes - begin) // size))()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    if mincore(ctypes.c_void_p(begin), ctypes.c_size_t(len(pages) * size), pages):
        raise OSError(ctypes.get_errno(), "mincore")
    return size * sum(page & 1 for page in pages)


def load(folder: str, dtype: str) -> Any:
    model = transformers.AutoModelForCausalLM
    return model.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = run()
    return time.perf_counter() - begin, result


def slowest(run: Callable[[], Any], times: int) -> Row:
    """Return the median seconds of a call that all ranks begin together, on the slowest rank."""
    taken = []
    for _ in range(1 + times):  # the first one sets torch up
        dist.barrier()
        taken.append(timed(run)[0])
    return {"seconds": max(of_all_ranks(median(taken[1:])))}


def step_of(taken: Sequence[tuple[float, torch.Tensor]]) -> Row:
    """Answer with the median of decode steps, of which the first may set torch up, and the last."""
    seconds = median(seconds for seconds, _ in taken)
    return {"seconds": seconds, "answers": answers_of(taken[-1][1]), "kept": []}


def of_all_ranks(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def main(options: Row, number: str = "0", store: str = "", host: str = "") -> None:
    rank = int(number)
    worker.end_with_parent()
    answer = worker.answers_only()
    cpattn.set_num_threads(options["threads"])
    torch.set_num_threads(options["threads"])
    if options["kind"] == "alone":
        worker.serve(Alone(*(options[name] for name in ("folder", "dtype", "attention"))), answer)
        return
    size, gbps = options["size"], options["link_gbps"]
    with ExitStack() as stack:
        store = store or f"file://{stack.enter_context(tempfile.TemporaryDirectory())}/store"
        hosts = stack.enter_context(Hosts(size, link_gbps=gbps)) if gbps and rank == 0 else None
        for other in range(1, size if rank == 0 else 1):
            path = [hosts.path(other)] if hosts else []
            start([json.dumps(options), str(other), store, *path])
        if gbps:  # threads that are started from now on are on the host, too
            enter(hosts.path(0) if hosts else host)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE if gbps else "lo"
        if size > 1:  # behind the start of the others, which would inherit it
            cpus = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(hours=12)
        )  # others wait while all other peers have their turns
        given = (options[name] for name in ("folder", "dtype", "num_pages", "placement"))
        engine = Engine(*given)
        if rank:
            follow(engine)
        worker.serve(Leader(engine), answer)


def start(arguments: Sequence[str]) -> None:
    """Start another rank, which ends with this one."""
    command = [sys.executable, "-m", "bench.models.process", *arguments]
    subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), *sys.argv[2:])
