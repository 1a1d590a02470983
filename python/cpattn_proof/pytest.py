# SPDX-License-Identifier: Apache-2.0
"""A test of an operator, of attention or of a selection of keys, for the repository that has it.

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
    """Make a test that fails with the report of `conform` if it has a finding or is not judged.

    Parameters
    ----------
    fn, signature, options
        As of `conform`.
    allow : tuple of str
        Kinds of findings that are known and not to fail the test.

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
