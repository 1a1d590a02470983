# SPDX-License-Identifier: Apache-2.0
"""The server of examples/, over two ranks: ten of OpenAI's clients at once, and one leaves."""

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
openai = pytest.importorskip("openai", reason="openai is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")
pytest.importorskip("starlette", reason="starlette is not installed")

from support.children import path_with  # noqa: E402
from support.places import ROOT  # noqa: E402
from support.time_limits import PATIENCE  # noqa: E402
from support.transformers.tiny_transformers import generate, make_model, make_tokens  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]
PROMPTS = [make_tokens(n, seed=n).tolist() for n in (5, 60, 1, 30, 200, 17, 9, 44, 80, 3)]
GREEDY = {"max_tokens": 10, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("log") / "log"
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "examples" / "serve_over_ranks.py"), str(folder), "--port", str(port)]
    command += ["--dtype", "float32", "--num-pages", "256", "--token-budget", "64"]
    environment = os.environ | {"PYTHONPATH": path_with(), "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"OMP_NUM_THREADS": "1", "CPATTN_NUM_THREADS": "1"}
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, *command], env=environment, stderr=output)
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=PATIENCE, max_retries=0
    )
    try:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            assert process.poll() is None, log.read_text()
            try:
                client.models.list()
                break
            except openai.APIConnectionError:
                time.sleep(0.2)
        yield client, process, log
    finally:
        process.terminate()
        process.wait(PATIENCE)


def complete(client, prompt, **options):
    return client.completions.create(model="model", prompt=prompt, **GREEDY | options)


def text(client, prompt, **options):
    return complete(client, prompt, **options).choices[0].text


def stream(client, prompt):
    choices = [event.choices[0] for event in complete(client, prompt, stream=True)]
    assert [choice.finish_reason for choice in choices] == [None] * 9 + ["length"]
    return "".join(choice.text for choice in choices)


def text_of(prompt):
    result = generate(make_model("llama"), "eager", torch.tensor([prompt]), 10)
    return " ".join(f"w{token}" for token in result.sequences[0, len(prompt) :].tolist())


def test_ten_clients_at_once_of_whom_one_goes_away(server):
    client, _, log = server
    with ThreadPoolExecutor(10) as pool:
        answers = [pool.submit(stream, client, prompt) for prompt in PROMPTS[:5]]
        answers += [pool.submit(text, client, prompt) for prompt in PROMPTS[5:9]]
        with complete(client, PROMPTS[9], max_tokens=3000, stream=True) as leaving:
            next(iter(leaving))
        for prompt, answer in zip(PROMPTS, answers, strict=False):
            assert answer.result() == text_of(prompt)
    deadline = time.monotonic() + PATIENCE
    while "ends before its last token" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert "of 200 tokens of its prompt" in log.read_text()
    answer = complete(client, "w5 w6 w7")
    assert answer.choices[0].text == text_of([5, 6, 7])
    assert text(client, "w5 w6 w7", temperature=1e-40) == text_of([5, 6, 7])
    assert answer.usage.to_dict() == {
        "prompt_tokens": 3, "completion_tokens": 10, "total_tokens": 13
    }  # fmt: skip
    with pytest.raises(openai.BadRequestError, match=r"must be in \[0, 64\)"):
        complete(client, [64])


def test_it_stops_when_it_is_told_to(server):
    client, process, log = server
    process.send_signal(signal.SIGINT)
    process.wait(PATIENCE)
    with pytest.raises(openai.APIConnectionError):
        client.models.list()
    assert "did not answer" not in log.read_text()
