# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for packages that sglang imports and PyPI lacks for CPUs: torchvision, sgl_kernel.

sglang is released for GPUs. Its engine runs on a CPU without these two packages, except for a few
names that it imports at the start and does not use there. `install` supplies only these names:
calling one raises NotImplementedError, and any other name raises AttributeError or ImportError,
each with the name. The stand-ins compute nothing, and never hide an installed package.

    python -m cpattn.integrations.sglang.cpu_engine serve --model-path ... --device cpu \\
      --attention-backend cpattn

is the command ``sglang serve`` in a process with the stand-ins; processes that sglang starts have
them, too. Your own program must call `install` at its top, outside of any function: sglang starts
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

from .._stand_in import StandIn, missing

_logger = logging.getLogger(__name__)

# Names that sglang 0.5.23 imports from sgl_kernel on a CPU: for speculative decoding, for moving
# entries of a KV cache, or for platforms whose operators sgl_kernel has.
_KERNELS = (
    "assign_draft_cache_locs_contiguous_cpu", "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu", "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu", "fill_accept_out_cache_loc_cpu", "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
)  # fmt: skip


class InterpolationMode(enum.Enum):
    """Names of torchvision's interpolation modes, without function."""

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


# Modules of each package with their names. sgl_kernel.scalar_type is left out, as sglang has names
# of its own if it cannot be imported.
_PACKAGES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "torchvision": (
        ("transforms", "transforms.functional"),
        {"InterpolationMode": InterpolationMode},
    ),
    "sgl_kernel": ((), {name: _absent("sgl_kernel", name) for name in _KERNELS}),
}


def install() -> ExitStack:
    """Let sglang, imported from now on, run on this CPU; ``with`` or `close` ends it.

    Sets ``SGLANG_USE_CPU_ENGINE=1`` for this process and its children. sglang keeps the names that
    it has imported after the end.

    Returns
    -------
    contextlib.ExitStack
        Removes the stand-ins at its end.

    Raises
    ------
    RuntimeError
        If sglang has been imported already, for another device.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1" and "sglang.srt.utils" in sys.modules:
        raise RuntimeError(
            "cpattn.integrations.sglang.cpu_engine.install: must be called before sglang is "
            "imported, and has been called after"
        )
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # transformers checks once for torchvision, and must not find this stand-in.
    importlib.import_module("transformers.utils").is_torchvision_available()
    installed = ExitStack()
    for package, (modules, names) in _PACKAGES.items():
        if package in sys.modules or find_spec(package) is not None:
            continue
        supplied = {**names, "__getattr__": missing(package, sorted(names))}
        installed.enter_context(StandIn(package, modules, supplied))
        _logger.info("cpattn stands in for %s, which has no release for this CPU", package)
    return installed


if __name__ in {"__main__", "__mp_main__"}:  # the latter in processes that sglang starts
    install()
if __name__ == "__main__":
    sys.argv[0] = "sglang"
    importlib.import_module("sglang.cli.main").main()
