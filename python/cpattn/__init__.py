# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention for LLM serving on CPU: plans, paged kernels and oracles."""

from . import reference
from ._core import __version__, active_isa, set_num_threads, supported_isas

__all__ = [
    "__version__",
    "active_isa",
    "reference",
    "set_num_threads",
    "supported_isas",
]


def __dir__() -> list[str]:
    return list(__all__)
