# SPDX-License-Identifier: Apache-2.0
"""What a signature is: how to call an operator that has it, and what can be said by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from ..cases import Case
from ..forms import checked
from ..judgement import Result
from ..tensors import Tensors


class Answer(NamedTuple):
    """What an operator returned, in one form.

    Attributes
    ----------
    out : tensor [rows, num_heads, v_head_dim]
        Rows of all sequences; any of padding may follow.
    lse : tensor [rows, num_heads] or None
        Natural logarithm, -inf for a row that sees no key. Looked at where `Features.lse` is True.
    """

    out: Any
    lse: Any = None


@dataclass(frozen=True)
class Features:
    """What calls of a signature can say. Only such cases are made.

    Attributes
    ----------
    layouts : tuple of {"paged", "ragged", "padded"}
        Where keys may lie.
    kv_layouts, page_sizes : tuple
        Of pages.
    head_dims : tuple of int
        Dimensions of heads, 64 among them; `v_head_dim` says whether values may have another.
    causal : tuple of bool
        Whether there are causal masks, and whether there is attention without.
    same_q_lens : bool
        Whether all sequences of a batch have equally many new tokens, at least one.
    prefix, short_kv, empty : bool
        Sequences with cached tokens; with more queries than keys; rows that see no key.
    groups : bool
        Query heads that share KV heads.
    window, window_without_causal, softcap, sinks, v_head_dim, lse, pad_rows, append : bool
        Whether there are such arguments or results; `Case` says what they are.
    far : bool
        Whether caches may be so large that page ids exceed 16 bits, and offsets 31 bits.
    poison : bool
        Whether what is hidden may be NaN. A mask that is added to scores hides finite keys only.
    """

    layouts: tuple[str, ...] = ("paged",)
    kv_layouts: tuple[str, ...] = ("NHD",)
    page_sizes: tuple[int, ...] = (4, 16, 64, 128)
    head_dims: tuple[int, ...] = (16, 32, 64)
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    causal: tuple[bool, ...] = (True, False)
    same_q_lens: bool = False
    prefix: bool = True
    short_kv: bool = False
    empty: bool = True
    groups: bool = True
    window: bool = False
    window_without_causal: bool = False
    softcap: bool = False
    sinks: bool = False
    v_head_dim: bool = False
    lse: bool = False
    pad_rows: bool = False
    append: bool = False
    far: bool = False
    poison: bool = True


@dataclass(frozen=True)
class Signature:
    """How to try an operator.

    Attributes
    ----------
    name : str
        As `conform` is given it.
    features : Features
    call : function of the operator and `Tensors`, which returns an `Answer`
        Calls it by its own arguments, and brings what it returns into one form.
    """

    name: str
    features: Features
    call: Callable[[Any, Tensors], Answer]

    def answer(self, fn: Any, case: Case, device: str) -> Result:
        """Call an operator on a case, and look at the form of what it returns."""
        tensors = Tensors(case, device)
        answer = self.call(fn, tensors)
        has_lse = self.features.lse
        result = checked(case, answer.out, answer.lse, has_lse=has_lse, device=device)
        if result.status != "answered":
            return result
        effect, message = tensors.side_effect()
        return replace(result, side_effect=effect, message=message)

    def failed(self, case: Case, status: str, message: str) -> Result:
        """What stands for an answer."""
        return Result(case, status, message=message)


def narrowed(signature: Signature, without: Sequence[str]) -> Signature:
    """The signature of an operator that does not do some of what could be said by it."""
    features = signature.features
    flags = [field.name for field in fields(Features) if isinstance(field.default, bool)]
    for name in without:
        if name in flags:
            features = replace(features, **{name: False})  # type: ignore[arg-type]
        elif name in features.dtypes and len(features.dtypes) > 1:
            left = tuple(dtype for dtype in features.dtypes if dtype != name)
            features = replace(features, dtypes=left)
        elif name == "causal" and len(features.causal) > 1:
            features = replace(features, causal=(False,))
        elif name in features.layouts and len(features.layouts) > 1:
            left = tuple(layout for layout in features.layouts if layout != name)
            features = replace(features, layouts=left)
        else:
            can = [flag for flag in flags if getattr(signature.features, flag)]
            several = ["causal", *features.dtypes, *features.layouts]
            raise ValueError(
                f"conform: without must be of {', '.join(can + several)}, of which a dtype and a "
                f"layout must stay, and attention with causal masks or without, got {name!r}"
            )
    return replace(signature, features=features)
