# SPDX-License-Identifier: Apache-2.0
"""The installed sglang, unmodified, on a machine without an NPU: its Ascend attention on CPU.

For processes of their own: what sglang imports and this machine lacks becomes a stand-in (see
`stand_ins`), sglang's configuration is published, and its process groups are made.
"""

from __future__ import annotations

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
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # else the groups ask the dispatcher for an accelerator

from torch.overrides import TorchFunctionMode
from transformers import AutoProcessor  # noqa: F401  likewise

from cpattn.integrations import torch_npu
from stand_ins import LackingFinder

MODULES = {
    "attention": "sglang.srt.hardware_backend.npu.attention.ascend_backend",
    "batch": "sglang.srt.model_executor.forward_batch_info",
    "context": "sglang.srt.model_executor.forward_context",
    "cp": "sglang.srt.layers.cp.utils",
    "cp_base": "sglang.srt.layers.cp.base",
    "groups": "sglang.srt.distributed.parallel_state",
    "models": "sglang.srt.configs.model_config",
    "npu_pools": "sglang.srt.hardware_backend.npu.memory_pool_npu",
    "pools": "sglang.srt.mem_cache.memory_pool",
    "radix": "sglang.srt.layers.radix_attention",
    "runtime": "sglang.srt.runtime_context",
    "speculation": "sglang.srt.speculative.spec_info",
}


def load() -> SimpleNamespace:
    """The modules of sglang under the keys of `MODULES`."""
    torch_npu.install()
    sys.meta_path.append(LackingFinder())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sglang = SimpleNamespace(
            **{key: importlib.import_module(name) for key, name in MODULES.items()}
        )
    sglang.npu_pools.torch_npu = sys.modules["torch_npu"]  # imported only where there is an NPU
    return sglang


class _NpuIsCpu(TorchFunctionMode):
    """Tensors asked for on the device "npu" are made on the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") == "npu":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


@contextlib.contextmanager
def context_parallel(
    sglang: SimpleNamespace, rank: int, size: int, strategy: str
) -> Iterator[None]:
    """A published configuration of sglang's, and its process groups as sglang makes them: all
    ranks are one group of context parallelism. `torch.distributed` is initialized already."""
    runtime, groups = sglang.runtime, sglang.groups
    configuration = runtime.get_context().override_server_args(
        tp_size=size, attn_cp_size=size, enable_prefill_cp=True, cp_strategy=strategy
    )
    with configuration:
        groups.set_custom_all_reduce(False)
        groups.init_distributed_environment(
            world_size=size, rank=rank, local_rank=rank, backend="gloo"
        )
        groups.initialize_model_parallel(backend="gloo")
        runtime.get_parallel().override_permanently(attn_cp_rank=rank, attn_tp_rank=0)
        yield
        runtime.get_parallel().tp_group.destroy()  # the one with shared memory


def make_backend(sglang: SimpleNamespace, runner: SimpleNamespace) -> Any:
    """An `AscendAttnBackend` of a model runner with no more than the backend asks for."""
    with _NpuIsCpu():
        return sglang.attention.AscendAttnBackend(runner)
