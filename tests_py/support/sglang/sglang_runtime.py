# SPDX-License-Identifier: Apache-2.0
"""The installed, unmodified sglang on a machine without an NPU: its Ascend attention on CPU, in a
separate process, with stand-ins for missing modules."""

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

os.environ["ASCEND_USE_FIA"] = "1"  # read when a pool or a backend is made
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # sglang compiles functions when imported, for triton
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # else groups ask the dispatcher for an accelerator

import torch
from transformers import AutoProcessor  # noqa: F401  before there is a stand-in of triton

from cpattn.integrations import torch_npu
from support.distributed.prefill_batches import Batch, Case, new_slots, slots_of
from support.sglang.sglang_planning import srt_modules
from support.stand_ins import DevicesAreTheCpu, LackingFinder

MODULES = srt_modules(
    "attention=hardware_backend.npu.attention.ascend_backend",
    "batch=model_executor.forward_batch_info context=model_executor.forward_context",
    "cp=layers.cp.utils cp_base=layers.cp.base deepseek=models.deepseek_v2",
    "groups=distributed.parallel_state indexer=layers.attention.dsa.dsa_indexer",
    "models=configs.model_config npu_indexer=layers.attention.dsa.dsa_npu_indexer",
    "npu_pools=hardware_backend.npu.memory_pool_npu pools=mem_cache.memory_pool",
    "radix=layers.radix_attention runtime=runtime_context speculation=speculative.spec_info",
)


def _load() -> SimpleNamespace:
    torch_npu.install()
    sys.meta_path.append(LackingFinder())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = {key: importlib.import_module(name) for key, name in MODULES.items()}
    sglang = SimpleNamespace(**modules)
    # Modules that found no NPU have not imported torch_npu.
    sglang.npu_pools.torch_npu = sglang.npu_indexer.torch_npu = sys.modules["torch_npu"]
    torch.npu = SimpleNamespace(is_available=lambda: False, current_stream=lambda: None)
    return sglang


SGLANG = _load()


@contextlib.contextmanager
def context_parallel(rank: int, size: int, strategy: str, **configuration: Any) -> Iterator[None]:
    """Publish a configuration of sglang and make its process groups as sglang does: all ranks are
    one group of context parallelism. `torch.distributed` is initialized already."""
    runtime, groups = SGLANG.runtime, SGLANG.groups
    split = {"tp_size": size, "attn_cp_size": size, "cp_strategy": strategy}
    context = runtime.get_context()
    with context.override_server_args(enable_prefill_cp=True, **split, **configuration):
        groups.set_custom_all_reduce(False)
        ranks = {"world_size": size, "rank": rank, "local_rank": rank}
        groups.init_distributed_environment(backend="gloo", **ranks)
        groups.initialize_model_parallel(backend="gloo")
        ranks = {"attn_cp_rank": rank, "attn_tp_rank": 0, "attn_dcp_rank": 0}
        runtime.get_parallel().override_permanently(**ranks)
        yield
        runtime.get_parallel().tp_group.destroy()  # this group has shared memory


def make_ascend_backend(case: Case, batch: Batch, pool: Any, model: dict[str, Any]) -> Any:
    """Make an `AscendAttnBackend` over a pool of KV pages, with a model runner that has only what
    the backend asks for."""
    sizes = len(case.extend_lens), max(case.seq_lens)
    requests = SGLANG.pools.ReqToTokenPool(*sizes, "cpu", enable_memory_saver=False)
    for s, n in enumerate(case.seq_lens):
        requests.write((s + 1, slice(0, n)), slots_of(batch.block_tables, s, n, case.page_size))
    types = {"device": "cpu", "dtype": case.dtype, "kv_cache_dtype": case.dtype}
    pools = {"page_size": case.page_size, "req_to_token_pool": requests, "token_to_kv_pool": pool}
    runner = SimpleNamespace(
        **dict.fromkeys(("is_draft_worker", "is_hybrid_swa"), False),
        model_config=SimpleNamespace(dtype=case.dtype, context_len=max(case.seq_lens), **model),
        server_args=SGLANG.runtime.get_server_args(),
        spec_algorithm=SGLANG.speculation.SpeculativeAlgorithm.NONE,
        use_mla_backend=model["attention_arch"] == SGLANG.models.AttentionArch.MLA,
        **types,
        **pools,
    )
    with DevicesAreTheCpu():
        return SGLANG.attention.AscendAttnBackend(runner)


def write_prefixes(pool: Any, layer: Any, case: Case, batch: Batch) -> list[torch.Tensor]:
    """Write prefixes into a pool of NaN; return the slots of each request's prefix."""
    for buffer in pool.get_kv_buffer(layer.layer_id):
        buffer.fill_(torch.nan)
    all_slots = []
    for s, prefix in enumerate(case.prefixes):
        all_slots.append(slots_of(batch.block_tables, s, prefix, case.page_size))
        pool.set_kv_buffer(layer, all_slots[-1], batch.k[s][:prefix], batch.v[s][:prefix])
    return all_slots


def make_forward_batch(case: Case, batch: Batch) -> Any:
    new = [slice(p, n) for p, n in zip(case.prefixes, case.seq_lens, strict=True)]
    seq_lens, num_tokens = torch.tensor(case.seq_lens), len(batch.q)
    slots = new_slots(batch.block_tables, case.prefixes, case.seq_lens, case.page_size)
    lens = {"seq_lens": seq_lens, "seq_lens_cpu": seq_lens, "seq_lens_sum": int(seq_lens.sum())}
    for name, values in (("seq", case.extend_lens), ("prefix", case.prefixes)):
        lens[f"extend_{name}_lens"] = torch.tensor(values)
        lens[f"extend_{name}_lens_cpu"] = list(values)
    return SGLANG.batch.ForwardBatch(
        forward_mode=SGLANG.batch.ForwardMode.EXTEND,
        batch_size=len(case.extend_lens),
        input_ids=torch.zeros(num_tokens, dtype=torch.int64),
        req_pool_indices=torch.arange(len(case.extend_lens)) + 1,
        out_cache_loc=torch.cat([slots, slots.new_zeros(num_tokens - len(slots))]),
        positions=torch.cat([torch.arange(rows.start, rows.stop) for rows in new]),
        extend_num_tokens=sum(case.extend_lens),
        **lens,
    )
