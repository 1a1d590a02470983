# SPDX-License-Identifier: Apache-2.0
"""Keeps torch's bfloat16 products from dying on machines with half-exposed AMX.

Some hypervisors pass AMX on but leave CPUID leaf 1DH empty. oneDNN, inside torch, takes its tile
shapes from that leaf, and its first tile instruction ends the process with SIGILL: ``torch.mm``,
``nn.Linear`` and SDPA in bfloat16 all do. Told in time not to use AMX, oneDNN works.
"""

from __future__ import annotations

import os
import sys
import warnings

from . import _core

VARIABLE = "ONEDNN_MAX_CPU_ISA"


def onednn_limit(*, amx_usable: bool, palette_missing: bool, has_avx512_fp16: bool) -> str | None:
    """The highest instruction set that oneDNN can use here, or None if it needs no limit."""
    if not (amx_usable and palette_missing):
        return None
    return "AVX512_CORE_FP16" if has_avx512_fp16 else "AVX512_CORE_BF16"


def prepare() -> str | None:
    """Limit oneDNN by an environment variable where its AMX kernels would be illegal instructions.

    Call it before the first ``import torch``; child processes inherit the variable. A value the
    user has set is left alone. If torch is imported already, which may be too late, it warns.

    Returns
    -------
    str or None
        One line that says what was done, or None where there was nothing to do.
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
