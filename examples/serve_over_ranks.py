# SPDX-License-Identifier: Apache-2.0
"""OpenAI's completions from a model of transformers over ranks, with continuous batching.

    torchrun --standalone --nproc-per-node 2 examples/serve_over_ranks.py model
    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr 192.168.1.10 \
        examples/serve_over_ranks.py model  # on each machine, with its rank

Then, from another terminal:

    curl localhost:8000/v1/completions -d '{"prompt": "Hello", "max_tokens": 16, "stream": true}'

Rank 0 listens, on loopback unless --host says otherwise, and tells the other ranks before each
batch which requests have come and which clients have left; all ranks then compute the batch. It
needs `pip install transformers uvicorn starlette`. There is no authentication, one model, and text
only: it shows how to call the engine. vLLM and sglang are the engines for more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import queue
import random
import signal
import threading
import time
import uuid
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import AutoModelForCausalLM, AutoTokenizer

from cpattn.integrations.transformers import ContextParallelModel

LOG = logging.getLogger("serve_over_ranks")
IDLE_SECONDS = 5.0  # after which ranks hear that there is nothing
KNOWN = {"model", "prompt", "max_tokens", "temperature", "top_p", "seed", "stream", "user"}


class Loop:
    """The engine's loop on every rank, and the only place where the engine is called."""

    def __init__(self, engine: ContextParallelModel) -> None:
        self.engine = engine
        self.commands: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()  # of rank 0
        self.stopping = False
        self._numbers: dict[str, int] = {}  # of the engine, by our own names
        self._tell: dict[str, Any] = {}  # of rank 0: who waits for the tokens of a request
        self._told: dict[int, int] = {}

    def submit(self, name: str, prompt: list[int], options: dict[str, Any], tell: Any) -> None:
        """Ask for tokens; `tell` is called with each NewToken, or with an error."""
        self._tell[name] = tell
        self.commands.put(("submit", name, prompt, options))

    def free(self, name: str) -> None:
        """End a request whose client has left, or has all it wanted."""
        self.commands.put(("free", name))

    def run(self) -> None:
        """Compute batches until rank 0 stops."""
        while (commands := self._next_commands()) is not None:
            for command in commands:
                self._obey(*command)
            names = {number: name for name, number in self._numbers.items()}
            for new in self.engine.step() if names else ():
                if new.finished:
                    del self._numbers[names[new.request]]
                if tell := self._tell.get(names[new.request]):
                    tell(new)
            self._log_progress(names)

    def _next_commands(self) -> list[tuple[Any, ...]] | None:
        """Commands that all ranks obey before the next batch; None to stop."""
        told: list[Any] = [[]]
        if dist.get_rank() == 0:
            patience = 0.0 if self._numbers else IDLE_SECONDS
            try:
                while True:
                    told[0].append(self.commands.get(timeout=patience))
                    patience = 0.0
            except queue.Empty:
                pass
            if self.stopping:
                told = [None]
        dist.broadcast_object_list(told, src=0)
        return told[0]

    def _obey(self, what: str, name: str, *arguments: Any) -> None:
        if what == "free":
            self._tell.pop(name, None)
            if name in self._numbers:
                LOG.info("%s ends before its last token", name)
                self.engine.free([self._numbers.pop(name)])
            return
        prompt, options = arguments
        try:
            self._numbers[name] = self.engine.submit(prompt, **options)
        except (TypeError, ValueError) as error:  # the same on every rank
            if tell := self._tell.get(name):
                tell(error)

    def _log_progress(self, names: dict[int, str]) -> None:
        progress = self.engine.progress()
        for number, (computed, whole) in progress.items():
            if computed != self._told.get(number, 0):
                LOG.info("%s: %d of %d tokens of its prompt", names[number], computed, whole)
        self._told = {number: computed for number, (computed, _) in progress.items()}


class Completions:
    """The HTTP face, on rank 0, in a thread of its own."""

    def __init__(self, loop: Loop, tokenizer: Any, name: str) -> None:
        self._loop, self._tokenizer, self._name = loop, tokenizer, name
        complete = Route("/v1/completions", self.complete, methods=["POST"])
        self.app = Starlette(routes=[complete, Route("/v1/models", self.models)])

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self._name, "object": "model"}]})

    async def complete(self, request: Request) -> Response:
        try:
            body = json.loads(await request.body())
            prompt, options = self._read(body)
        except (KeyError, TypeError, ValueError) as error:
            return _refusal(error)
        name = f"cmpl-{uuid.uuid4().hex[:12]}"
        news: asyncio.Queue[Any] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self._loop.submit(
            name, prompt, options, lambda new: loop.call_soon_threadsafe(news.put_nowait, new)
        )
        pieces = self._pieces(name, options["max_new_tokens"], news, request)
        try:
            first = await anext(pieces, ("", None))  # what is wrong with the request is known now
        except ValueError as error:
            return _refusal(error)
        if body.get("stream"):
            events = self._events(name, first, pieces)
            return StreamingResponse(events, media_type="text/event-stream")
        told = [first, *[piece async for piece in pieces]]
        answer = self._answer(name, "".join(text for text, _ in told), told[-1][1])
        counts = {"prompt_tokens": len(prompt), "completion_tokens": len(told)}
        answer["usage"] = counts | {"total_tokens": sum(counts.values())}
        return JSONResponse(answer)

    def _read(self, body: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        """Token ids of a prompt, and what the engine gets."""
        if unknown := sorted(name for name in set(body) - KNOWN if body[name] is not None):
            raise ValueError(f"not supported here: {', '.join(unknown)}")
        prompt = body["prompt"]
        ids = self._tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        temperature = float(body.get("temperature", 1.0))
        options: dict[str, Any] = {"max_new_tokens": int(body.get("max_tokens", 16))}
        options["seed"] = int(body.get("seed", random.getrandbits(31)))
        options["do_sample"] = temperature > 1e-4  # by less logits overflow
        if options["do_sample"]:
            options |= {"temperature": temperature, "top_k": 0}
            options["top_p"] = float(body.get("top_p", 1.0))
        return ids, options

    async def _pieces(
        self, name: str, most: int, news: asyncio.Queue[Any], request: Request
    ) -> AsyncIterator[tuple[str, str | None]]:
        """The text of each token, and why the last one is the last; ends with the client."""
        tokens, sent = list[int](), ""
        try:
            while True:
                if await request.is_disconnected():
                    return
                try:
                    new = await asyncio.wait_for(news.get(), 0.5)
                except asyncio.TimeoutError:
                    continue
                if isinstance(new, Exception):
                    raise ValueError(str(new))
                tokens.append(new.token)
                text = self._tokenizer.decode(tokens, skip_special_tokens=True)
                # Half a character is told with its other half.
                piece = "" if text.endswith("\ufffd") and not new.finished else text[len(sent) :]
                sent += piece
                reason = "length" if len(tokens) == most else "stop"
                yield piece, reason if new.finished else None
                if new.finished:
                    return
        finally:  # also when the client leaves
            self._loop.free(name)

    async def _events(self, name: str, first: Any, pieces: Any) -> AsyncIterator[str]:
        try:
            yield f"data: {json.dumps(self._answer(name, *first))}\n\n"
            async for piece in pieces:
                yield f"data: {json.dumps(self._answer(name, *piece))}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            await pieces.aclose()

    def _answer(self, name: str, text: str, reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        common = {"id": name, "object": "text_completion", "created": int(time.time())}
        return {**common, "model": self._name, "choices": [choice]}


def _refusal(error: Exception) -> Response:
    said = {"message": f"{type(error).__name__}: {error}", "type": "invalid_request_error"}
    return JSONResponse({"error": said}, status_code=400)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="folder of a causal language model and its tokenizer")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--placement", default="replicated")
    parser.add_argument("--num-pages", type=int, default=4096)
    parser.add_argument("--token-budget", type=int, default=2048)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype)
    loop = Loop(
        ContextParallelModel(
            model, placement=options.placement, num_pages=options.num_pages,
            token_budget=options.token_budget,
        )
    )  # fmt: skip
    if dist.get_rank() == 0:
        face = Completions(loop, AutoTokenizer.from_pretrained(options.model), options.model)
        config = uvicorn.Config(face.app, options.host, options.port, log_level="warning")
        threading.Thread(target=uvicorn.Server(config).run, daemon=True).start()
        LOG.info("%r answers on http://%s:%d", loop.engine, options.host, options.port)
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 stops all of them between two batches
        signal.signal(number, lambda *_: setattr(loop, "stopping", True))
    loop.run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
