# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for what sglang imports on a CPU and PyPI has not for one: torchvision, sgl_kernel.

sglang is released for GPUs. Its engine runs on a CPU without these two, but for a few names that it
imports at the start and does not use there. `install` supplies these names and nothing else:
whoever calls one gets a NotImplementedError, whoever asks for another one an AttributeError or an
ImportError, each with its name. Nothing is computed here, and a package that is installed is never
hidden.

    python -m cpattn.integrations.sglang.cpu_engine serve --model-path ... --device cpu \\
      --attention-backend cpattn

is the command ``sglang serve`` in a process with the stand-ins; processes that sglang starts have
them, too. Programs of one's own call `install` at their top, outside of any function: sglang starts
processes that run the top of the program again.
"""

from __future__ import annotations

import enum
import importlib
import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any, NoReturn

from .._stand_in import StandIn

_logger = logging.getLogger(__name__)

# What sglang 0.5.23 imports of sgl_kernel on a CPU: all for speculative decoding, for moving
# entries of a KV cache, or for platforms whose operators sgl_kernel has.
_KERNELS = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
)


class InterpolationMode(enum.Enum):
    """The names of torchvision's ways to resize images; nothing here resizes any."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def _absent(package: str, name: str) -> Callable[..., NoReturn]:
    def kernel(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{package}.{name}: this {package} is cpattn's stand-in for CPUs, which has no kernels"
        )

    kernel.__name__ = kernel.__qualname__ = name
    return kernel


def _missing(package: str, supplied: list[str]) -> Callable[[str], NoReturn]:
    def missing(name: str) -> NoReturn:
        raise AttributeError(
            f"this {package} is cpattn's stand-in for CPUs and has no {name}; "
            f"it supplies {', '.join(supplied)}"
        )

    return missing


# Of each package its modules and their names. sgl_kernel.scalar_type is left out: where it cannot
# be imported sglang has names of its own.
_PACKAGES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "torchvision": (
        ("transforms", "transforms.functional"),
        {"InterpolationMode": InterpolationMode},
    ),
    "sgl_kernel": ((), {name: _absent("sgl_kernel", name) for name in _KERNELS}),
}


def install() -> ExitStack:
    """Let sglang, imported from now on, run on this CPU; ``with`` or `close` ends it.

    Sets ``SGLANG_USE_CPU_ENGINE=1`` for this process and those that it starts. What sglang has
    imported stays with it after the end.

    Returns
    -------
    contextlib.ExitStack
        Takes the stand-ins away again.

    Raises
    ------
    RuntimeError
        sglang has been imported, for another device.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1" and "sglang.srt.utils" in sys.modules:
        raise RuntimeError(
            "cpattn.integrations.sglang.cpu_engine.install: must be called before sglang is "
            "imported, and has been called after"
        )
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # transformers asks once whether there is a torchvision, and must not take this one for it.
    importlib.import_module("transformers.utils").is_torchvision_available()
    installed = ExitStack()
    for package, (modules, names) in _PACKAGES.items():
        if package in sys.modules or find_spec(package) is not None:
            continue
        supplied = {**names, "__getattr__": _missing(package, sorted(names))}
        installed.enter_context(StandIn(package, modules, supplied))
        _logger.info("cpattn stands in for %s, which has no release for this CPU", package)
    return installed


if __name__ in {"__main__", "__mp_main__"}:  # the latter in processes that sglang starts
    install()
if __name__ == "__main__":
    sys.argv[0] = "sglang"
    importlib.import_module("sglang.cli.main").main()
