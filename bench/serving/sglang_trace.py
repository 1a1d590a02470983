# SPDX-License-Identifier: Apache-2.0
"""A trace of requests through sglang's server: its OpenAI endpoint, streaming, two in turns."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.contender import Failed
from bench.harness.worker import child_environment
from bench.serving.load import Load
from bench.serving.sglang_process import ENVIRONMENT, started_by

START_SECONDS, STOP_SECONDS, ANSWER_SECONDS = 300.0, 30.0, 600.0
STEP_TOKENS = 2048  # of a chunk of prompts


@dataclass(frozen=True)
class Turn:
    """One load on one server, in seconds."""

    wall: float
    first: list[float]  # of each request: from when it is due to the first text


class Server:
    """A server that is being started; `wait` for it before asking."""

    def __init__(
        self, backend: str, model: Path, num_threads: int, page_size: int, max_tokens: int
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.name = backend
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        options = {
            "model-path": model,
            "device": "cpu",
            "dtype": "bfloat16",
            "attention-backend": backend,
            "page-size": page_size,
            "max-total-tokens": max_tokens,
            "chunked-prefill-size": STEP_TOKENS,
            "host": "127.0.0.1",
            "port": self._port,
            "log-level": "warning",
        }
        command = [sys.executable, "-m", "bench.serving.sglang_process", "serve"]
        command += [f"--{name}={value}" for name, value in options.items()]
        # A server that waits for its turn would take a core.
        command += ["--sleep-on-idle", "--skip-server-warmup"]
        variables = {"CPATTN_NUM_THREADS": str(num_threads), "OMP_NUM_THREADS": str(num_threads)}
        self._process = subprocess.Popen(
            command,
            env=child_environment(**variables, **ENVIRONMENT),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def wait(self) -> None:
        """Wait until it answers; Failed with the last line of its log if it does not."""
        end = time.monotonic() + START_SECONDS
        while self._process.poll() is None and time.monotonic() < end:
            try:
                with self._request("GET", "/health"):
                    return
            except OSError:
                time.sleep(0.5)
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip().splitlines()[-1:]
        raise Failed("crashed", ": ".join([f"no server {self.name}", *said]))

    def serve(self, work: Load, pace: float) -> Turn:
        """A load whose arrivals are stretched by `pace`: 0 is all at once."""
        with self._request("POST", "/flush_cache"):
            pass
        due = [arrival * pace for arrival in work.arrivals]
        begin = time.perf_counter()

        def ask(number: int) -> float:
            time.sleep(max(0.0, begin + due[number] - time.perf_counter()))
            first = self._stream(work.prompts[number], work.output_lengths[number])
            return first - begin - due[number]

        with ThreadPoolExecutor(len(due)) as clients:
            first = list(clients.map(ask, range(len(due))))
        return Turn(time.perf_counter() - begin, first)

    def stop(self) -> None:
        """Ask it to end, then end its remaining processes."""
        if self._process.poll() is None:
            started_by(self._process.pid)
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._log.close()

    def _stream(self, prompt: list[int], num_tokens: int) -> float:
        """Return the time of the first text. Failed for another number of tokens than requested."""
        body = {
            "model": "default",
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        first, answered = 0.0, 0
        with self._request("POST", "/v1/completions", body) as response:
            for line in response:
                _, _, data = line.decode().strip().partition("data: ")
                if not data or data == "[DONE]":
                    continue
                chunk = json.loads(data)
                if not first and any(choice["text"] for choice in chunk.get("choices", ())):
                    first = time.perf_counter()
                answered = (chunk.get("usage") or {}).get("completion_tokens", answered)
        if answered != num_tokens or not first:
            raise Failed("wrong", f"{self.name} answered {answered} tokens of {num_tokens}")
        return first

    def _request(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        """The response, whose end closes the connection; OSError if it is no success."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_SECONDS)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise OSError(f"{method} {path}: {response.status}: {response.read()[:200]!r}")
        return response


def take_turns(
    servers: Sequence[Server], rounds: int, work: Load, pace: float
) -> dict[str, list[Turn]]:
    """The turns of each server, by name."""
    turns: dict[str, list[Turn]] = {server.name: [] for server in servers}
    for _ in range(rounds):
        for server in servers:
            turns[server.name].append(server.serve(work, pace))
    return turns
