# SPDX-License-Identifier: Apache-2.0
"""Planning parts of the installed sglang, imported without an accelerator."""

import dataclasses
import functools
import importlib
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from support.stand_ins import stand_ins_for_what_lacks


def srt_modules(*rows: str) -> dict[str, str]:
    """Return names of modules below sglang.srt by keys, from rows of "key=name key=name"."""
    pairs = (pair.split("=") for row in rows for pair in row.split())
    return {key: f"sglang.srt.{name}" for key, name in pairs}


MODULES = srt_modules(
    "zigzag=layers.cp.zigzag interleave=layers.cp.interleave padding=layers.cp.padding",
    "cp_base=layers.cp.base runtime=runtime_context batch=model_executor.forward_batch_info",
    "dsa=layers.attention.dsa_backend topk=layers.attention.dsa.dsa_topk_backend",
    "utils=disaggregation.common.utils conn=disaggregation.common.conn",
    "ascend=disaggregation.ascend.conn mooncake=disaggregation.mooncake.conn",
    "disaggregation=disaggregation.utils pools=mem_cache.memory_pool",
    "striped_allocator=mem_cache.allocator.page_interleave",
    "striped_pools=mem_cache.page_interleave_pool striping=mem_cache.page_interleave",
    "options=arg_groups.fields.exec_ registry=plugins.hook_registry plugins=plugins",
)


@functools.cache
def load() -> SimpleNamespace:
    """Import the modules under the keys of `MODULES`.

    They have stand-ins for missing modules, above all triton, but no others see these: torch and
    transformers check earlier which modules there are.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch._inductor.compile_fx")
        importlib.import_module("transformers").AutoProcessor  # noqa: B018
        with stand_ins_for_what_lacks():
            modules = {key: importlib.import_module(name) for key, name in MODULES.items()}
    return SimpleNamespace(**modules)


def make_strategy(sglang: SimpleNamespace, name: str, rank: int, size: int) -> Any:
    """Make sglang's own strategy, with a rank that needs no process group."""
    zigzag, interleave = sglang.zigzag.ZigzagCPStrategy, sglang.interleave.InterleaveCPStrategy
    base = {"zigzag": zigzag, "interleave": interleave}[name]
    return type("Strategy", (base,), {"cp_rank": rank})(size)


def kv_list(layers: range, groups: str, drafts: int = 0) -> list[str]:
    """List the contents of a server's buffers, in its order."""
    target = [f"{group}{layer}" for group in groups for layer in layers]
    return target + [f"d{group}{layer}" for group in groups for layer in range(drafts)]


def random_stage(rng: np.random.Generator) -> tuple[int, range]:
    """Return a model's number of layers, and the layers of one pipeline stage."""
    num_layers = int(rng.integers(1, 24))
    start = int(rng.integers(0, num_layers))
    return num_layers, range(start, int(rng.integers(start, num_layers)) + 1)


def assert_same(ours: Any, theirs: Any, case: Any = None) -> None:
    """Check that two metadata have equal fields, with types, devices and values."""
    assert type(ours) is type(theirs)
    assert vars(ours).keys() == vars(theirs).keys()
    for field in dataclasses.fields(theirs):
        got, wanted = getattr(ours, field.name), getattr(theirs, field.name)
        assert type(got) is type(wanted), (field.name, case)
        if isinstance(wanted, torch.Tensor):
            assert (got.dtype, got.device) == (wanted.dtype, wanted.device), (field.name, case)
            assert got.is_contiguous()
            got, wanted = got.tolist(), wanted.tolist()
        if isinstance(wanted, list):
            assert all(type(item) is int for item in got), (field.name, case)
        assert got == wanted, (field.name, case)
