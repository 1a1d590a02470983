# SPDX-License-Identifier: Apache-2.0
"""Bugs of attention, pools and transfer in sglang, in files of the releases with these bugs."""

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import cpattn
from cpattn.transfer import sglang_0_5_23
from cpattn_proof import Report, lint
from cpattn_proof.linting.adapters.transfers import from_transfer, memory_of_lists, memory_of_pool
from support.distributed.prefill_batches import Case, expected_of, make_batch, slots_of
from support.npu.fia_cases import TEMPLATE
from support.proof.shipped import assert_proved, assert_refuted_as_written, shipped_entry
from support.sglang.sglang_planning import kv_list
from support.sglang.sglang_releases import release
from support.tolerances import assert_attended

CP_SIZE = 2

# Attention of Ascend with several requests, and with rows of physical padding.

TWO = Case("two requests", (17, 30), (5, 40), page_size=16)
ONE = Case("one request", (29,), (11,), page_size=16)


def attention_by_release(version: str, case: Case, pad_rows: int = 0) -> torch.Tensor:
    batch = make_batch(case)
    tables, caches = batch.block_tables, (batch.k_cache, batch.v_cache)
    lens = case.extend_lens, case.seq_lens
    slots = [slots_of(tables, s, n, case.page_size) for s, n in enumerate(case.seq_lens)]
    for cache, rows in zip(caches, (batch.k, batch.v), strict=True):
        cache[torch.cat(slots)] = torch.cat(rows)
    options = {"qk_head_dim": case.head_dim, "scaling": case.head_dim**-0.5}
    options |= {"tp_k_head_num": case.num_kv_heads, "tp_q_head_num": case.num_heads}
    options |= {"tp_v_head_num": case.num_kv_heads, "v_head_dim": case.v_head_dim}
    layer = SimpleNamespace(**options)
    backend = SimpleNamespace(
        fia_mask=TEMPLATE,
        forward_metadata=SimpleNamespace(block_tables=tables.int()),
        page_size=case.page_size,
    )
    attention, cp = "hardware_backend.npu.attention.ascend_backend", "layers.utils.cp_utils"
    parts = []
    with release(version, attention=attention, cp=cp) as sglang:
        for rank in range(CP_SIZE):
            ours = cpattn.build_cp_metadata(*lens, cp_rank=rank, cp_size=CP_SIZE)
            arguments = [sum(case.extend_lens), rank, CP_SIZE, case.seq_lens]
            if version == "0.5.18":
                arguments.append(list(case.extend_lens))
            metadata = sglang.cp.prepare_context_parallel_metadata(*arguments)
            q = torch.nn.functional.pad(ours.shard(batch.q.flatten(1)), (0, 0, 0, pad_rows))
            forward_batch = SimpleNamespace(attn_cp_metadata=metadata)
            attend = sglang.attention.AscendAttnBackend.do_cp_attn_fia
            parts.append(attend(backend, q, *caches, layer, forward_batch))
    return ours.unshard(parts).unflatten(1, (case.num_heads, -1))


NO_PAD_ROWS = "actual_seq_lengths must end at the number of packed rows"
KNOWN = [
    *(("0.5.12", ONE, 0, None), ("0.5.18", TWO, 0, None)),
    ("0.5.12", TWO, 0, "block_table must have one row per sequence"),
    *(("0.5.12", ONE, 2, NO_PAD_ROWS), ("0.5.18", TWO, 2, NO_PAD_ROWS)),
]


@pytest.mark.parametrize(("version", "case", "pad_rows", "refused"), KNOWN)
def test_26705_attention_knew_one_request_and_no_pad_rows(version, case, pad_rows, refused):
    """Release 0.5.12 passes the operator one request, and halves its rows; up to 0.5.22 pad rows
    of no request reach the operator."""
    with pytest.raises(ValueError, match=refused) if refused else contextlib.nullcontext():
        theirs = attention_by_release(version, case, pad_rows)
        assert_attended(theirs, None, expected_of(case), "float32")


# Transfer of MLA buffers from a pipeline stage to a decode server with all layers.


def memory_of(names: list[str], layers: dict[str, tuple[int, str]]) -> dict[str, Any]:
    ones, labels = [1] * len(names), [layers[name] for name in names]
    memory = memory_of_lists(range(len(names)), ones, ones, labels, page_size=1)
    for name, buffer in zip(names, memory["entries"], strict=True):
        buffer["draft"] = name.startswith("d")
    return memory


def linted(src: list[str], dst: list[str], targets: list[int]) -> Report:
    kinds = {"K": "k", "V": "v", "I": "index_k"}
    layers = {name: (int(name[-1]), kinds[name[-2]]) for name in [*src, *dst]}
    blocks = list(range(len(targets))), targets, [1] * len(targets)
    return lint(from_transfer(memory_of(src, layers), memory_of(dst, layers), blocks, [0], [0]))


def sent_by_release(version: str, src: list[str], dst: list[str], **kv_args) -> list[int]:
    """Return where a release's `AscendKVManager.send_kvcache` puts each buffer of a stage."""
    common = {"conn": "disaggregation.common.conn", "utils": "disaggregation.common.utils"}
    engines = {"ascend": "disaggregation.ascend.conn", "mooncake": "disaggregation.mooncake.conn"}
    others = {"base": "disaggregation.base.conn", "environ": "environ"}
    with release(version, **common, **engines, **others) as sglang:
        manager = object.__new__(sglang.ascend.AscendKVManager)
        blocks = []
        manager.pp_size, manager.is_mla_backend = 2, True
        manager.enable_custom_mem_pool = False
        manager._transfer_data = lambda session, transfer_blocks: blocks.extend(transfer_blocks)
        manager.kv_args = SimpleNamespace(
            kv_data_ptrs=list(range(len(src))), kv_item_lens=[1] * len(src), **kv_args
        )
        page = np.zeros(1, np.int32)
        manager.send_kvcache("session", page, list(range(len(dst))), page, None)
        sglang.conn.CommonKVReceiver._ctx.term()
    return [target for _, target, _ in blocks]


@pytest.mark.parametrize(
    ("version", "groups", "num_drafts"),
    [("0.5.11", "KVI", 0), ("0.5.18", "KV", 1)],
    ids=["0.5.11: three groups halved", "0.5.18: drafts of the stage"],
)
def test_23893_a_stage_s_buffers_went_to_those_of_other_layers(version, groups, num_drafts):
    """Release 0.5.11 takes any list for K and then V; up to 0.5.19 a stage has no drafts."""
    stage = kv_list(range(2, 4), groups, num_drafts)
    decode = kv_list(range(4), groups, num_drafts)
    kv_args = {"prefill_start_layer": 2, "kv_buf_groups": len(groups), "total_kv_layers": 4}
    sent = sent_by_release(version, stage, decode, **kv_args)
    theirs = [decode[target] for target in sent]
    assert theirs[:2] == stage[:2]
    assert theirs[2:] != stage[2:]
    assert not set(stage) <= set(theirs)
    entry = shipped_entry("sgl-project/sglang#23893", "lint")
    assert_refuted_as_written(linted(stage, decode, sent), entry)

    options = {"prefill_start_layer": 2, "kv_buf_groups": len(groups), "hidden_kv_layers": 4}
    options |= {"draft_kv_layers": num_drafts, "is_last_rank": True}
    _, ours, _ = sglang_0_5_23.get_mla_kv_ptrs_with_pp(
        list(range(len(stage))), list(range(len(decode))), **options
    )
    assert [decode[i] for i in ours] == stage
    assert_proved(linted(stage, decode, ours), entry)


# Lengths of pages under the layout of the FIA operator (#15852).


def test_15852_a_page_was_as_long_as_a_token(monkeypatch):
    """A transfer moved one token of each page in 0.5.9; release 0.5.10 has the factor."""
    monkeypatch.setenv("ASCEND_USE_FIA", "1")
    sizes = {"size": 64, "page_size": 8, "head_dim": 16}
    theirs, reports = {}, {}
    for version in ("0.5.9", "0.5.10"):
        with release(
            version, npu_pools="hardware_backend.npu.memory_pool_npu", pools="mem_cache.memory_pool"
        ) as sglang:
            sglang.npu_pools.get_bool_env_var = lambda *_: True
            sglang.pools.maybe_init_custom_mem_pool = lambda **_: (False, None, None)
            options = {"dtype": torch.float16, "head_num": 2, "layer_num": 3, "device": "cpu"}
            options |= {"enable_memory_saver": False}
            pool = sglang.npu_pools.NPUMHATokenToKVPool(**options, **sizes)
            _, _, theirs[version] = pool.get_contiguous_buf_infos()
            memory = memory_of_pool(pool) | {"num_pages": 64 // 8 + 1}
            begins = [buffer["addr"] + 3 * buffer["item_len"] for buffer in memory["entries"]]
            blocks = begins, begins, theirs[version]
            reports[version] = lint(from_transfer(memory, memory, blocks, [3], [3]))
    entry = shipped_entry("sgl-project/sglang#15852", "lint")
    assert_refuted_as_written(reports["0.5.9"], entry)
    assert_proved(reports["0.5.10"], entry)
    pool = cpattn.kv.MHATokenToKVPool(num_layers=3, num_kv_heads=2, dtype="float16", **sizes)
    _, _, ours = pool.get_contiguous_buf_infos()
    token = 2 * 16 * 2  # heads * dim * bytes
    assert theirs == {"0.5.9": [token] * 6, "0.5.10": [8 * token] * 6}
    assert list(ours) == theirs["0.5.10"]
