# SPDX-License-Identifier: Apache-2.0
"""Tests of an operator, of attention or of key selection, for the operator's own repository.

from cpattn_proof.pytest import conforms

test_attention = conforms("my.module:attention", signature="flash_attn_varlen")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .conformance import conform
from .conformance.child import Operator
from .conformance.selection import SelectionSignature
from .conformance.signatures import Signature


def conforms(
    fn: Operator,
    *,
    signature: str | Signature | SelectionSignature,
    allow: tuple[str, ...] = (),
    **options: Any,
) -> Callable[[], None]:
    """Make a test that fails with the report of `conform` on a finding or if nothing is judged.

    Parameters
    ----------
    fn, signature, options
        Arguments of `conform`.
    allow : tuple of str
        Kinds of known findings that do not fail the test.

    Examples
    --------
    >>> test_own = conforms("cpattn:paged_attention", signature="cpattn", examples=5)
    >>> test_own()
    """

    def test() -> None:
        report = conform(fn, signature=signature, **options)
        found = [finding.kind for finding in report.findings if finding.kind not in allow]
        if found or report.verdict == "not judged":
            raise AssertionError(report.text())

    return test
