# SPDX-License-Identifier: Apache-2.0
"""A model of transformers over ranks generates the tokens of one process."""

import re
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import torch.distributed as dist  # noqa: E402

from cpattn.integrations.transformers import ContextParallelModel  # noqa: E402
from cpattn.integrations.transformers.context_parallel.layers import layer_shapes  # noqa: E402
from support.distributed.distributed_worker import run_world  # noqa: E402
from support.time_limits import BUSY  # noqa: E402
from support.tolerances import assert_logits_close  # noqa: E402
from support.transformers import over_ranks as worker  # noqa: E402
from support.transformers.faults_over_ranks import (  # noqa: E402
    DEATH,
    LOSSES,
    OWN,
    TIMEOUT,
    run_faults,
)
from support.transformers.over_ranks import (  # noqa: E402
    NEW_TOKENS,
    PAGES,
    PENALTIES,
    POSITIONS,
    PROMPTS,
    alone,
)
from support.transformers.tiny_transformers import (  # noqa: E402
    BART,
    CONFIGS,
    INDEXED_CONFIGS,
    MORE_CONFIGS,
    SIZES,
    make_model,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")
WORLD = {"preload": worker.__name__}
EVERY_PLACEMENT = (
    "replicated",
    "shared",
    "page_interleave",
    "token_interleave",
    "token_interleave:3",
)


@pytest.fixture(scope="module")
def expected():
    model = make_model("llama")
    return [alone(model, prompt) for prompt in PROMPTS]


@contextmanager
def one_rank():
    """Make a group of this process; others would import transformers for ten seconds."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def of_one_rank():
    with one_rank():
        return worker.run_core(0)


@pytest.fixture(
    scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["one rank", "2 ranks"]
)
def answers(request, of_one_rank, tmp_path_factory):
    """Return what each rank found."""
    if request.param == 1:
        return [of_one_rank]
    path = tmp_path_factory.mktemp("world")
    return run_world(request.param, path, worker.run_core, **WORLD)


def logprobs_of(model, prompt, tokens):
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")
def test_tokens_are_those_of_one_process(answers, expected):
    model = make_model("llama")
    longer = alone(model, PROMPTS[0] + expected[0])
    limited = make_model("llama")
    limited.config.max_position_embeddings = POSITIONS
    of_no_length = [alone(limited, prompt, new_tokens=None) for prompt in PROMPTS[::3]]
    for found in answers:
        assert found["tokens"] == found["again"] == expected
        assert found["longer"] == [longer]
        assert found["after"] == expected[:1]
        assert found["penalised"] == [alone(model, p, **PENALTIES) for p in PROMPTS[:2]]
        assert [len(tokens) for tokens in found["of no length"]] == [20, 12, 20]
        assert found["of no length"] == of_no_length
        end = expected[1].index(expected[1][3]) + 1
        assert found["stopped"][1] == found["stopped by text"][1] == expected[1][:end]
        for prompt, tokens, ours in zip(PROMPTS, expected, found["logprobs"], strict=True):
            assert_logits_close(ours, logprobs_of(model, prompt, tokens))
    assert answers[0]["streamed"] == [PROMPTS[0] + expected[0], *([t] for t in longer), []]
    assert all(found["streamed"] is None for found in answers[1:])


def test_prefixes_are_skipped(answers):
    """Prompts share two pages, and a prompt that occurs twice has two more."""
    in_one_call = 3 * 16 + 32
    full_pages = sum(min(len(prompt) // 8 * 8, len(prompt) - 1) for prompt in PROMPTS)
    for found in answers:
        assert found["hits"] == (in_one_call, full_pages)
        assert found["hits of what was generated"] == 32  # 25 tokens and 12, of which 11 are kept


def test_drawn_tokens_are_the_same_on_every_rank(answers, of_one_rank):
    drawn = of_one_rank["drawn"]
    assert all(found["drawn"] == drawn for found in answers)
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][1] != drawn[0][6]  # one prompt at two places


def test_logits_are_those_of_the_model(answers, expected):
    with torch.inference_mode():
        model = make_model("llama")
        for rank, found in enumerate(answers):
            for i, prompt in enumerate(PROMPTS[:3]):
                whole = torch.tensor([prompt + expected[i][:3]])
                logits = model(whole).logits[0, len(prompt) - 1 :].numpy()
                for ours, theirs in zip(found["logits"], logits, strict=True):
                    assert_logits_close(ours[i], theirs)
            assert "room for another of its max_new_tokens" in found["full"]
            assert re.search(r"decode: tokens\[\d+\] must be an integer, got float", found["real"])
            if len(answers) > 1:
                assert rank or "rank 1 refused its arguments; nothing was sent" in found["real"]
                assert "tokens of rank 1 differs from rank 0; nothing was sent" in found["other"]
            assert found["none"] == [[0, 64], [0, 64]]


def test_requests_come_and_go(answers, expected):
    for found in answers:
        assert found["mixed"]["kept"] == [expected[0], *expected[2:4]]
        assert found["mixed"]["left"] == []
        computed, whole = found["mixed"]["progress"]
        assert 0 < computed < whole == 60
        assert found["free"] == PAGES


def test_what_cannot_be_is_told_to_all_ranks(answers):
    differs = "of rank 1 differs from rank 0"
    for rank, found in enumerate(answers):
        errors = found["errors"]
        assert "809" not in errors["long"]
        assert "need 101 pages of 8, and of 96 are 96 there: 5 pages are missing" in errors["long"]
        assert "give ContextParallelModel num_pages=101" in errors["long"]
        assert "num_beams is not supported, got 2" in errors["beams"]
        assert "token_healing is not supported, got True" in errors["healing"]
        assert "tokens of prompts[0] must be in [0, 64), got 64 to 64" in errors["vocabulary"]
        assert "prompts[0] must be a list of at least one token" in errors["empty"]
        assert "4 pages are missing" in errors["prefill"]
        if len(answers) == 1:
            continue  # the others are errors of ranks that differ, or of some ranks
        assert f"prompts {differs}" in errors["prompts"]
        assert "prefill: requests of prefill hold the pages" in errors["stripes"]
        assert "MemoryError: no room for this token" in errors["pools"]
        assert f"weights {differs}" in errors["weights"], rank
        assert f"config of the model {differs}" in errors["config"]
        assert f"arguments of ContextParallelModel {differs}" in errors["arguments"]
        assert f"release of transformers {differs}" in errors["release"]


ROPE = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "num_experts": 2}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
VISION |= {"num_attention_heads": 1, "image_size": 28, "patch_size": 14}
IMAGES = {"text_config": SIZES, "vision_config": VISION}
REFUSED = {
    "encoder": (lambda: transformers.T5Config(vocab_size=64, d_model=16), "with a decoder"),
    "state": (lambda: transformers.MambaConfig(vocab_size=64, hidden_size=16), "MambaForCausalLM"),
    "state in some layers": (lambda: transformers.Qwen3NextConfig(**SIZES, **HYBRID), "linear_att"),
    "images": (lambda: transformers.Gemma3Config(**IMAGES), "than text (vision_config)"),
    "own attention": (lambda: transformers.BloomConfig(vocab_size=64), "BloomForCausalLM"),
    "positions of its own": (lambda: transformers.BartConfig(**BART), "BartForCausalLM: layer 0"),
    "all logits": (
        lambda: transformers.WhisperConfig(**BART, pad_token_id=0),
        "2 rows of logits for 1",
    ),
    "long rows": (lambda: transformers.LlamaConfig(**SIZES | {"head_dim": 600}), "in [1, 576]"),
    "rope of the longest": (lambda: transformers.LlamaConfig(**SIZES, **ROPE), "rope (dynamic)"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_that_cannot_run_so_is_refused_by_name(what):
    config, reason = REFUSED[what]
    causal, with_encoder = transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM
    model = (with_encoder if what == "encoder" else causal).from_config(config()).eval()
    with pytest.raises(ValueError, match="ContextParallelModel: the model must be") as error:
        layer_shapes(model)
    assert reason in str(error.value)


def test_groups_and_placements_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="group must be given, or init_process_group"):
        ContextParallelModel(make_model("llama"))
    with pytest.raises(ValueError, match="placement must be replicated, shared, page_inter"):
        ContextParallelModel(make_model("llama"), placement="everywhere")


def test_training_and_shared_out_weights_are_refused():
    model = make_model("llama")
    model.train()
    with pytest.raises(ValueError, match=r"call model.eval\(\)"):
        layer_shapes(model)
    model.eval()._tp_size = 2
    with pytest.raises(ValueError, match="weights are tensor-parallel"):
        layer_shapes(model)


# Each kind of attention has each placement on 2, 3 or 4 ranks; further models have one each.
KINDS = (*CONFIGS, *INDEXED_CONFIGS)
WORLDS = [
    (name, size, EVERY_PLACEMENT[(size + number) % 3 :: 3])
    for number, name in enumerate(KINDS)
    for size in (2, 3, 4)
]
WORLDS += [
    (name, 2 + number % 3, EVERY_PLACEMENT[number % 5 :][:1])
    for number, name in enumerate(MORE_CONFIGS)
]


def expected_of(name, placements):
    model = make_model(name)
    tokens = [alone(model, prompt)[: NEW_TOKENS // 2] for prompt in PROMPTS]
    return [tokens, tokens, tokens, tokens[:2], tokens[3:4]] * len(placements)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "placements"), WORLDS)
def test_every_model_and_placement(tmp_path, name, size, placements):
    expected = expected_of(name, placements)
    for found in run_world(size, tmp_path, worker.run_model, name, placements, **WORLD):
        assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KINDS, *MORE_CONFIGS])
def test_every_model_on_one_rank(name):
    placements = EVERY_PLACEMENT[:1]
    with one_rank():
        assert worker.run_model(0, name, placements) == expected_of(name, placements)


@pytest.mark.slow
def test_every_exchange_and_strategy(tmp_path, expected):
    exchanges = ("gather", "pass_q", "ring", "all_to_all")
    strategies = ("zigzag", "interleave", "contiguous")
    arguments = worker.run_exchanges, exchanges, strategies
    for found in run_world(4, tmp_path, *arguments, **WORLD):
        assert found == [expected] * 13


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    path, cases = tmp_path_factory.mktemp("faults"), (*LOSSES, *OWN)
    return run_world(3, path, run_faults, cases, preload=run_faults.__module__)


def assert_all_dropped(told):
    """Check that requests and cached pages are dropped, since ranks might differ in them."""
    assert (told.requests, told.cached_pages) == (0, 0)


def assert_named(told):
    assert "rank 1 of 3 did not answer" in told.error
    assert told.seconds < TIMEOUT + 1 + BUSY
    assert_all_dropped(told)


@pytest.mark.slow
@pytest.mark.parametrize("case", LOSSES, ids="-".join)
def test_a_rank_that_stops_or_is_late_is_named(faults, case):
    first, culprit, third = (found[case] for found in faults)
    assert_named(first)
    assert_named(third)
    assert "has left" in culprit.error
    assert_all_dropped(culprit)


@pytest.mark.slow
def test_a_rank_that_dies_is_named(tmp_path):
    first, culprit, third = run_world(
        3, tmp_path, run_faults, [DEATH], preload=run_faults.__module__
    )
    assert culprit is None
    assert_named(first[DEATH])
    assert_named(third[DEATH])
    assert not dist.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize("case", OWN, ids="-".join)
def test_an_error_of_one_rank_is_told_at_once_and_all_go_on(faults, expected, case):
    told = [found[case] for found in faults]
    own = [one.error == "MemoryError: no room for this token" for one in told]
    assert sum(own) == 1
    rank = own.index(True)
    for one, is_own in zip(told, own, strict=True):
        if case[0] == "streamer":  # other ranks need not know of it
            assert is_own or one.error == "no error"
        else:
            named = f"rank {rank} refused its arguments; nothing was sent: MemoryError"
            assert is_own or named in one.error
            assert_all_dropped(one)
        assert one.seconds < TIMEOUT
        assert one.again == expected
