# SPDX-License-Identifier: Apache-2.0
"""Signatures: how to call an operator, and which cases such calls can express."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

from ..attention import ATTENTION
from ..cases import Case, Features
from ..forms import checked
from ..judgement import Result
from ..tensors import Tensors
from ..trials import Kind


class Answer(NamedTuple):
    """Result of an operator in the form that is judged.

    Attributes
    ----------
    out : tensor [rows, num_heads, v_head_dim]
        Rows of all sequences; padding rows may follow.
    lse : tensor [rows, num_heads] or None
        Natural logarithm, -inf for a row that sees no key. Checked if `Features.lse` is True.
    """

    out: Any
    lse: Any = None


@dataclass(frozen=True)
class Signature:
    """Signature of operators for attention: how to call one and read its answer.

    Attributes
    ----------
    name : str
        Name for `conform`.
    features : Features
    call : function of the operator and `Tensors`, which returns an `Answer`
        It calls the operator by its own arguments, and converts the results.
    """

    name: str
    features: Features
    call: Callable[[Any, Tensors], Answer]
    kind: ClassVar[Kind] = ATTENTION

    def answer(self, fn: Any, case: Case, device: str) -> Result:
        """Call an operator on a case, and check the form of its results."""
        tensors = Tensors(case, device)
        answer = self.call(fn, tensors)
        has_lse = self.features.lse and (self.features.alibi_lse or not case.alibi)
        result = checked(case, answer.out, answer.lse, has_lse=has_lse, device=device)
        if result.status != "answered":
            return result
        effect, message = tensors.side_effect()
        return replace(result, side_effect=effect, message=message)


SignatureT = TypeVar("SignatureT", bound=Any)


def narrowed(signature: SignatureT, without: Sequence[str]) -> SignatureT:
    """Return the signature of an operator that lacks some abilities of this one."""
    features = signature.features
    can = [field.name for field in fields(features) if getattr(features, field.name) is True]
    several = {x: field for field in ("dtypes", "layouts") for x in getattr(features, field, ())}
    for name in without:
        field = several.get(name, name)
        values = getattr(features, field, ())
        change: object = False
        if name == "causal" and len(values) > 1:
            change = (False,)
        elif name in several and len(values) > 1:
            change = tuple(value for value in values if value != name)
        elif name not in can:
            names = ", ".join([*can, *(["causal", *several] if several else [])])
            rest = (
                ", of which a dtype and a layout must stay, and attention with causal masks or "
                "without"
            ) if several else ""  # fmt: skip
            raise ValueError(f"conform: without must be of {names}{rest}, got {name!r}")
        features = replace(features, **{field: change})
    return replace(signature, features=features)
