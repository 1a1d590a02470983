# SPDX-License-Identifier: Apache-2.0
"""Hooks on functions of sglang, and their switch.

All hooks wrap sglang's functions and just call them while their part is off. `uninstall` therefore
works at any time, and hooks of other plug-ins on the same functions stay in force. (A *replacing*
hook could not call the original, as sglang rebinds every name of it to the hook.)
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from ...captures.recorder import capture_by_environment
from .._support import find
from . import cp_cpu, metadata, planners, shards

SGLANG = "0.5.23"  # the release with matching results
DEFAULT_PARTS = ("metadata", "topk", "kv", "shards", "attention")
BACKEND = "cpattn"  # of --attention-backend

_logger = logging.getLogger(__name__)
_active: set[str] = set()  # parts that are on
_hooked: set[str] = set()  # targets with our hooks in sglang's registry


class _Hook(NamedTuple):
    part: str
    module: str  # below sglang.srt
    name: str
    function: Callable[..., Any]
    calls_original: bool = False

    @property
    def target(self) -> str:
        return f"sglang.srt.{self.module}.{self.name}"


_HOOKS = (
    _Hook(
        "metadata", "layers.cp.zigzag", "ZigzagCPStrategy.build_metadata", metadata.build_metadata
    ),
    _Hook(
        "metadata",
        "layers.cp.interleave",
        "InterleaveCPStrategy.build_metadata",
        metadata.build_metadata,
    ),
    _Hook(
        "topk",
        "layers.attention.dsa_backend",
        "DeepseekSparseAttnBackend.get_topk_transform_method",
        planners.get_topk_transform_method,
    ),
    _Hook(
        "kv",
        "disaggregation.common.utils",
        "group_concurrent_contiguous",
        planners.group_concurrent_contiguous,
    ),
    _Hook(
        "shards",
        "disaggregation.utils",
        "filter_kv_indices_for_shard_rank",
        shards.filter_kv_indices_for_shard_rank,
    ),
    _Hook(
        "shards",
        "mem_cache.allocator.page_interleave",
        "PageInterleavePoolAllocator.alloc_extend",
        shards.alloc_extend,
        calls_original=True,
    ),
    _Hook(
        "shards",
        "mem_cache.allocator.page_interleave",
        "PageInterleavePoolAllocator.free",
        shards.free,
        calls_original=True,
    ),
    _Hook(
        "shards",
        "mem_cache.page_interleave_pool",
        "PageInterleaveKVPoolMixin.begin_shard_extend",
        shards.begin_shard_extend,
        calls_original=True,
    ),
    _Hook(
        "strict_kv",
        "disaggregation.utils",
        "setup_state_kv_args",
        planners.record_kv_layers,
        calls_original=True,
    ),
    _Hook(
        "strict_kv",
        "disaggregation.common.conn",
        "CommonKVManager.get_mha_kv_ptrs_with_pp",
        planners.strict_mha_kv_ptrs,
        calls_original=True,
    ),
    _Hook(
        "strict_kv",
        "disaggregation.common.conn",
        "CommonKVManager.get_mla_kv_ptrs_with_pp",
        planners.strict_mla_kv_ptrs,
        calls_original=True,
    ),
    _Hook(
        "strict_kv",
        "disaggregation.ascend.conn",
        "AscendKVManager.get_mla_kv_ptrs_with_pp",
        planners.strict_mla_kv_ptrs,
        calls_original=True,
    ),
    _Hook(
        "cp_cpu",
        "model_executor.runner.eager_runner",
        "EagerRunner._execute_extend_cp",
        cp_cpu.execute_extend_cp,
        calls_original=True,
    ),
)
PARTS = (*dict.fromkeys(hook.part for hook in _HOOKS), "attention")


def install(*parts: str) -> None:
    """Turn on parts of the plug-in. sglang calls this in each of its processes.

    For another release of sglang than 0.5.23, the call only logs a warning.

    To call it yourself, do so before the engine starts. A call with parts turns on exactly these
    parts; a call without parts keeps any parts that are on.

    Parameters
    ----------
    *parts : str
        Some of ``"metadata"``, ``"topk"``, ``"kv"``, ``"shards"``, ``"attention"``, ``"strict_kv"``
        and ``"cp_cpu"``. Default: the parts in the environment variable CPATTN_SGLANG_PARTS,
        separated by commas; else all but the last two. With CPATTN_PLUGINS=0 in the environment the
        call does nothing. ``"attention"`` adds the name cpattn to the values of
        ``--attention-backend``; without that value, sglang's own backend stays. ``"cp_cpu"`` lets
        ``--enable-prefill-cp`` run on a CPU.

    Raises
    ------
    ValueError
        If a part is unknown.
    RuntimeError
        If another plug-in already hooks one of the functions, as sglang would ignore our hook.

    Examples
    --------
    >>> install("metadata", "kv")  # doctest: +SKIP
    """
    if os.environ.get("CPATTN_PLUGINS") == "0" or (_active and not parts):
        return
    if not _is_for(importlib.import_module("sglang.version").__version__):
        return
    capture_by_environment()
    wanted = parts or _parts_of_environment()
    for part in wanted:
        if part not in PARTS:
            raise ValueError(
                f"cpattn.integrations.sglang.install: parts (CPATTN_SGLANG_PARTS) must be among "
                f"{PARTS}, got {part!r}"
            )
    hooks = [hook for hook in _HOOKS if hook.part in wanted and _is_there(hook)]
    _register([hook for hook in hooks if hook.target not in _hooked])
    _active.clear()
    _active.update(wanted)
    _name_backend("attention" in wanted)
    _log(hooks)


def _is_for(release: str) -> bool:
    """Tell whether the plug-in was tried with a release of sglang.

    Functions of other releases have other arguments and results under the same names.
    """
    tried = find("sglang").verdict(release) == "tried"
    if not tried:
        _logger.warning(
            "cpattn leaves sglang %s alone: its plug-in is for %s, and no function is replaced",
            release,
            SGLANG,
        )
    return tried


def uninstall() -> None:
    """Turn all parts off, so that sglang's own functions run again.

    Examples
    --------
    >>> uninstall()  # doctest: +SKIP
    """
    _active.clear()
    _name_backend(False)


def _parts_of_environment() -> tuple[str, ...]:
    listed = os.environ.get("CPATTN_SGLANG_PARTS", ",".join(DEFAULT_PARTS))
    return tuple(part.strip() for part in listed.split(",") if part.strip())


def _register(hooks: list[_Hook]) -> None:
    plugins = importlib.import_module("sglang.srt.plugins.hook_registry")
    registry = plugins.HookRegistry
    for hook in hooks:
        if hook.target in registry._patched:
            raise RuntimeError(
                "cpattn.integrations.sglang.install: must be called before sglang applies other "
                f"hooks to {hook.target}, and has been called after"
            )
    for hook in hooks:
        registry.register(hook.target, _around(hook), plugins.HookType.AROUND)
        _hooked.add(hook.target)
    # sglang applies the hooks of all plug-ins itself, after the last plug-in.
    if plugins._current_plugin_source.get() is None:
        registry.apply_hooks()


def _name_backend(known: bool) -> None:
    """Add the attention backend to sglang's names, or remove it; its class is imported on use."""
    choices = importlib.import_module("sglang.srt.arg_groups.choices").ATTENTION_BACKEND_CHOICES
    if known and BACKEND not in choices:
        choices.append(BACKEND)
    elif not known and BACKEND in choices:
        choices.remove(BACKEND)
    registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
    if known:
        registry.register_attention_backend(BACKEND)(_make_backend)
    else:
        registry.ATTENTION_BACKENDS.pop(BACKEND, None)


def _make_backend(runner: Any) -> Any:
    from .attention import CpattnAttnBackend

    backend = CpattnAttnBackend(runner)
    if runner.server_args.enable_prefill_cp and "cp_cpu" not in _active:
        _logger.warning(
            "sglang asks CUDA for a stream when it splits a prompt: CPATTN_SGLANG_PARTS must list "
            "cp_cpu, and metadata,attention, for --enable-prefill-cp on a CPU"
        )
    return backend


def _is_there(hook: _Hook) -> bool:
    """Tell whether the function exists in this release on this machine; else skip its hook."""
    try:
        attrgetter(hook.name)(importlib.import_module(f"sglang.srt.{hook.module}"))
    except Exception as error:  # not only ImportError: modules also look for their devices
        _logger.info("cpattn leaves %s alone: %s", hook.target, error)
        return False
    return True


def _around(hook: _Hook) -> Callable[..., Any]:
    part, function = hook.part, hook.function

    def instead(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return (function if part in _active else original)(*args, **kwargs)

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if part not in _active:
            return original(*args, **kwargs)
        return function(original, *args, **kwargs)

    return around if hook.calls_original else instead


def _log(hooks: list[_Hook]) -> None:
    if hooks:
        names = ", ".join(hook.name for hook in hooks)
        _logger.info("cpattn plans for sglang: %s (off: CPATTN_PLUGINS=0)", names)
