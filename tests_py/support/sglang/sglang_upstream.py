# SPDX-License-Identifier: Apache-2.0
"""KV-transfer code of sglang itself, run without its imports: from a wheel of 0.5.23 or the package
in the folder CPATTN_SGLANG, else from an installed one.

`MODULES` are the real files. Every other module of sglang, and every module missing here, becomes a
stand-in whose attributes are all the empty class `Absent`.
"""

import functools
import importlib
import os
import re
import sys
import warnings
import zipfile
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from audit.records import note
from support.sglang.sglang_planning import srt_modules
from support.stand_ins import PackageFinder, stand_ins_for_what_lacks

MODULES = srt_modules(
    "utils=disaggregation.common.utils conn=disaggregation.common.conn",
    "ascend=disaggregation.ascend.conn mooncake=disaggregation.mooncake.conn",
    "base=disaggregation.base.conn disaggregation=disaggregation.utils",
    "staging=disaggregation.common.staging_buffer environ=environ",
    "pools=mem_cache.memory_pool",
    "npu_pools=hardware_backend.npu.memory_pool_npu",
)


def _find_files() -> Path | zipfile.Path | None:
    if given := os.environ.get("CPATTN_SGLANG"):
        wheel = next(Path(given).glob("sglang-*.whl"), None)
        return zipfile.Path(wheel) if wheel else Path(given)
    spec = find_spec("sglang")
    return Path(spec.origin).parents[1] if spec and spec.origin else None


def load() -> SimpleNamespace | None:
    """Return the modules under the keys of `MODULES`; None if sglang is missing."""
    root = _find_files()
    if root is None:
        return None
    note("engine", "sglang, its KV transfer alone", _version(root))
    return _load(root)


def load_or_skip() -> SimpleNamespace:
    modules = load()
    if modules is None:
        pytest.skip("sglang is not installed and CPATTN_SGLANG names no wheel of it")
    return modules


def _version(root: Path | zipfile.Path) -> str:
    """Read the version from the wheel's name, or from pip's files beside the package."""
    names = [root.root.filename] if isinstance(root, zipfile.Path) else map(str, root.iterdir())
    found = [match[1] for name in names if (match := re.search(r"\bsglang-([\d.]+\d)", str(name)))]
    return found[0] if found else "of unknown version"


@functools.cache
def _load(root: Path | zipfile.Path) -> SimpleNamespace:
    sys.meta_path.insert(0, PackageFinder("sglang", root, MODULES.values()))
    with stand_ins_for_what_lacks(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = {key: importlib.import_module(name) for key, name in MODULES.items()}
    upstream = SimpleNamespace(**modules)
    _supply_what_they_call(upstream)
    return upstream


def _supply_what_they_call(upstream: SimpleNamespace) -> None:
    """Supply the few functions outside of `MODULES` whose results matter."""
    upstream.parallel = SimpleNamespace(
        pp_group=SimpleNamespace(is_last_rank=False), attn_dcp_size=1, attn_dcp_rank=0
    )
    upstream.ascend.get_parallel = upstream.npu_pools.get_parallel = lambda: upstream.parallel
    upstream.pools.maybe_init_custom_mem_pool = lambda device: (False, None, None)
    upstream.npu_pools.get_bool_env_var = lambda name, default="false": (
        os.environ.get(name, default).lower() in ("true", "1")
    )
    upstream.npu_pools.torch_npu = SimpleNamespace(
        npu_scatter_nd_update_=_scatter_rows, _npu_reshape_and_cache=_reshape_and_cache
    )


def _scatter_rows(target: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> None:
    target[indices[:, 0].long()] = updates


def _reshape_and_cache(
    *, key: Any, value: Any, key_cache: Any, value_cache: Any, slot_indices: Any
) -> None:
    for cache, rows in ((key_cache, key), (value_cache, value)):
        cache.view(-1, *cache.shape[2:])[slot_indices.long()] = rows


class RecordingEngine:
    """Stand-in for the transfer engine: records the blocks of all calls."""

    def __init__(self) -> None:
        self.blocks: list[tuple[int, int, int]] = []

    def batch_transfer_sync(self, session: str, src: Any, dst: Any, lengths: Any) -> int:
        self.blocks += zip(src, dst, lengths, strict=True)
        return 0


class ImmediateExecutor:
    """Executor that runs functions at once, so that blocks come in order."""

    def submit(self, function: Any, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*args))
        return future


def make_manager(upstream: SimpleNamespace, kind: str = "ascend", **attributes: Any) -> Any:
    """Make a KV manager of sglang with only what a sender needs, and a recording engine."""
    ascend, mooncake = upstream.ascend.AscendKVManager, upstream.mooncake.MooncakeKVManager
    base = {"ascend": ascend, "mooncake": mooncake}[kind]
    manager = object.__new__(base)
    manager.engine = RecordingEngine()
    defaults = {"pp_size": 1, "attn_tp_size": 1, "is_mla_backend": False}
    defaults |= {"is_hybrid_mla_backend": False, "enable_custom_mem_pool": False}
    defaults |= {"max_transfer_batch_indices": 0, "state_strides_validated": set()}
    vars(manager).update(defaults | attributes)
    return manager
