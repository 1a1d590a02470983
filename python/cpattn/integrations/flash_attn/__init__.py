# SPDX-License-Identifier: Apache-2.0
"""The forward functions of flash-attn 2.8 on CPU tensors.

Arguments, their order, masks aligned to the bottom right corner, and the layouts of the log-sum-exp
are those of the package. The log-sum-exp is natural, float32, [heads, tokens] for ragged batches
and [batch, heads, tokens] for others, and +inf for a row that sees no key, whose output is zero.
Keys and values are never copied. There is no backward pass or dropout: a ValueError names an
unsupported argument.

`install` makes ``import flash_attn`` find these functions.
"""

from __future__ import annotations

from typing import Any, NoReturn

from .._stand_in import StandIn
from ._batch import _flash_attn_forward, flash_attn_func
from ._cache import flash_attn_with_kvcache
from ._ragged import _flash_attn_varlen_forward, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "install"]


def _flash_attn_backward(*_: Any, **__: Any) -> NoReturn:
    """Exist for libraries that import the name."""
    raise NotImplementedError("_flash_attn_backward: cpattn has no backward pass")


_flash_attn_varlen_backward = _flash_attn_backward


def install() -> StandIn:
    """Install these functions as modules ``flash_attn`` and ``flash_attn.flash_attn_interface``.

    Returns
    -------
    StandIn
        Context manager; its ``remove()`` or the end of a ``with`` removes the modules.

    Raises
    ------
    ImportError
        If a package of that name can be imported.

    Examples
    --------
    >>> from cpattn.integrations import flash_attn
    >>> with flash_attn.install():
    ...     from flash_attn import flash_attn_varlen_func
    """
    names: dict[str, Any] = {
        function.__name__: function
        for function in (
            flash_attn_func,
            flash_attn_varlen_func,
            flash_attn_with_kvcache,
            _flash_attn_forward,
            _flash_attn_varlen_forward,
            _flash_attn_backward,
        )
    }
    names["_flash_attn_varlen_backward"] = _flash_attn_varlen_backward
    names["__version__"] = "2.8.3"
    return StandIn("flash_attn", ["flash_attn_interface"], names)
