# SPDX-License-Identifier: Apache-2.0
"""Guard against crashes of torch's bfloat16 products on machines with half-exposed AMX.

Some hypervisors pass AMX on but leave CPUID leaf 1DH empty. oneDNN, inside torch, reads its tile
shapes from that leaf, and its first tile instruction ends the process with SIGILL: ``torch.mm``,
``nn.Linear`` and SDPA in bfloat16 all crash. Without AMX, oneDNN works.
"""

from __future__ import annotations

import os
import sys
import warnings

from . import _core

VARIABLE = "ONEDNN_MAX_CPU_ISA"


def onednn_limit(*, amx_usable: bool, palette_missing: bool, has_avx512_fp16: bool) -> str | None:
    """Return the highest instruction set that oneDNN may use, or None if it needs no limit."""
    if not (amx_usable and palette_missing):
        return None
    return "AVX512_CORE_FP16" if has_avx512_fp16 else "AVX512_CORE_BF16"


def prepare() -> str | None:
    """Set an environment variable that limits oneDNN if its AMX kernels would crash.

    Call it before the first ``import torch``; child processes inherit the variable. The call keeps
    a value that the user has set, and warns if torch is imported already, which may be too late.

    Returns
    -------
    str or None
        A line that says what the call did, or None if there was nothing to do.
    """
    if VARIABLE in os.environ:
        return None
    limit = onednn_limit(
        amx_usable=_core.amx_usable(),
        palette_missing=_core.amx_palette_missing(),
        has_avx512_fp16=_core.has_avx512_fp16(),
    )
    if limit is None:
        return None
    os.environ[VARIABLE] = limit
    if "torch" in sys.modules:
        warnings.warn(
            f"cpattn.torch_guard.prepare() came after torch was imported: {VARIABLE}={limit} may "
            "not take effect, and bfloat16 products may be illegal instructions",
            RuntimeWarning,
            stacklevel=2,
        )
    return (
        f"{VARIABLE}={limit} is set for torch: this machine has AMX without its CPUID leaf 1DH, "
        "on which oneDNN's bfloat16 products would be illegal instructions"
    )
