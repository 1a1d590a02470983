# SPDX-License-Identifier: Apache-2.0
"""The whole engine of sglang on a CPU with the attention backend cpattn, found like an installed
plug-in, gives the tokens of eager attention, alone, batched and from the radix cache."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from support.children import path_with
from support.engine_runs import run_engines
from support.entry_points import write_distribution

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed", allow_module_level=True)

from support.sglang.sglang_models import ENVIRONMENT, eager_answers, leave_nothing, write_tokenizer
from support.vllm.vllm_models import random_prompts, write_model

TIMEOUT = 900.0  # seconds, of engines one after the other
pytestmark = [pytest.mark.engine("sglang"), pytest.mark.timeout(TIMEOUT + 60)]

# There are more prompts than places in a batch; their shared prefix is more than a page of 64.
PROMPTS = random_prompts([150, 77, 300, 84, 91, 101], shared=70)
NUM_TOKENS = 12
# Runs have chunks, mixed steps of prefill and decode, windows, softcap; all have grouped heads.
RUNS = {
    "llama": {"page_size": 16, "chunked_prefill_size": 64, "enable_mixed_chunk": True},
    "gemma2": {"page_size": 64},
}
RUNS["llama"]["max_running_requests"] = 4
SLOW_RUNS = {
    "deepseek_v3": {"page_size": 16},
    "gemma3_text": {"page_size": 128, "chunked_prefill_size": 128, "disable_radix_cache": True},
}
SLOW_RUNS["gemma3_text"]["disable_overlap_schedule"] = True
# Two ranks over gloo, which share each prompt.
SPLIT = {"tp_size": 2, "attn_cp_size": 2, "enable_prefill_cp": True, "cp_strategy": "zigzag"}
# Models are configured so that the second layer has experts.
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
EXPERTS |= {"first_k_dense_replace": 1, "moe_intermediate_size": 64, "n_group": 2, "topk_group": 1}
# Names from before transformers 5 that sglang reads.
EXPERTS |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
CHANGES = {"deepseek_v3": EXPERTS}
CHANGES["gemma3_text"] = {"num_attention_heads": 2, "num_key_value_heads": 1}


def bound_to_cpus():
    """Return settings of two ranks on separate CPUs, with the part that splits prompts."""
    cpus = sorted(os.sched_getaffinity(0))
    return {
        "SGLANG_CPU_OMP_THREADS_BIND": f"{cpus[0]}|{cpus[-1]}",
        "CPATTN_SGLANG_PARTS": "metadata, attention, cp_cpu",
    }


def answers_of(runs, folder, **environment):
    """Return the answers of sglang and of eager attention for each model, and sglang's log."""
    for name in runs:
        write_model(folder / name, name, **CHANGES.get(name, {}))
    common = {"dtype": "float32", "attention_backend": "cpattn"}
    asked = {
        "rounds": [PROMPTS[:1], PROMPTS, PROMPTS[::-1]],
        "sampling": {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True},
    }
    described = [
        {"engine": {"model_path": str(folder / name), **common, **options}, **asked}
        for name, options in runs.items()
    ]
    options = {"timeout": TIMEOUT, **ENVIRONMENT, **environment}
    results, log = run_engines("support.sglang.sglang_generate", described, folder, **options)
    eager = [eager_answers(folder / name, PROMPTS, NUM_TOKENS) for name in runs]
    return dict(zip(runs, zip(results, eager, strict=True), strict=True)), log


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return answers_of(RUNS, tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module")
def slow_answers(tmp_path_factory):
    return answers_of(SLOW_RUNS, tmp_path_factory.mktemp("slow_engines"))


def assert_tokens(result, eager):
    assert len(set(map(tuple, eager))) == len(eager)  # answers depend on the prompts,
    assert len({token for tokens in eager for token in tokens}) > 20  # and are hard to guess
    alone, batched, again = result["tokens"]
    assert alone == eager[:1]
    assert batched == eager
    assert again[::-1] == eager


@pytest.mark.parametrize("kind", RUNS)
def test_tokens_of_eager_attention(answers, kind):
    result, eager = answers[0][kind]
    assert_tokens(result, eager)
    page = RUNS[kind]["page_size"]
    shared, length = 70 // page * page, 300 // page * page
    assert result["num_cached"][0] == [0]
    assert min(result["num_cached"][1]) >= shared
    assert max(result["num_cached"][2]) >= length - page


@pytest.mark.slow
@pytest.mark.parametrize("kind", SLOW_RUNS)
def test_tokens_of_eager_attention_slow(slow_answers, kind):
    assert_tokens(*slow_answers[0][kind])


@pytest.mark.slow
def test_tokens_of_eager_attention_over_ranks(tmp_path):
    """Each rank logs once that prompts are split."""
    answers, log = answers_of({"qwen3": {"page_size": 1, **SPLIT}}, tmp_path, **bound_to_cpus())
    assert_tokens(*answers["qwen3"])
    assert log.count("cpattn has sglang prefill in context parallel on this CPU") == 2


def test_one_line_of_the_log_says_that_it_is_on(answers):
    lines = [line for line in answers[1].splitlines() if "cpattn computes attention" in line]
    assert [line.partition("cpattn ")[2].split(", ")[:2] for line in lines] == [
        ["computes attention: float32", f"pages of {options['page_size']}"]
        for options in RUNS.values()
    ]


def ask(port, path, body=None):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT / 4) as answer:
            return answer.read()
    except (urllib.error.URLError, ConnectionError):
        return None


@pytest.mark.slow
def test_the_server_of_the_documents(tmp_path, children):
    """Its two ranks share the heads, so none splits a prompt."""
    write_tokenizer(write_model(tmp_path / "llama"))
    write_distribution(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "cpattn.integrations.sglang.cpu_engine", "serve"),
        *("--model-path", tmp_path / "llama", "--port", str(port), "--dtype", "float32"),
        *("--device", "cpu", "--attention-backend", "cpattn", "--page-size", "16"),
        *("--max-total-tokens", "2048", "--tp-size", "2"),
    ]
    environment = {**os.environ, **ENVIRONMENT, **bound_to_cpus()}
    environment["PYTHONPATH"] = path_with(tmp_path)
    with (tmp_path / "log").open("w") as log:
        streams = {"stdout": log, "stderr": subprocess.STDOUT}
        server = children.start(command, env=environment, **streams)
    end = time.monotonic() + TIMEOUT / 2
    while server.poll() is None and time.monotonic() < end and ask(port, "/health") is None:
        time.sleep(0.5)
    text = " ".join(f"w{token}" for token in PROMPTS[1])
    asked = {"model": "default", "prompt": text, "max_tokens": NUM_TOKENS, "temperature": 0}
    answer = ask(port, "/v1/completions", asked)
    if server.poll() is None:
        leave_nothing(server.pid)
    server.terminate()  # it also ends the processes that it started
    server.wait(timeout=TIMEOUT / 4)
    log = (tmp_path / "log").read_text()
    assert answer is not None, log[-4000:]
    [eager] = eager_answers(tmp_path / "llama", PROMPTS[1:2], NUM_TOKENS)
    assert json.loads(answer)["choices"][0]["text"].split() == [f"w{token}" for token in eager]
    assert "in context parallel" not in log
    assert log.count("cpattn computes attention: float32, pages of 16") == 2
