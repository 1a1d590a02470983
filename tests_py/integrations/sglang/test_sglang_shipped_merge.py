# SPDX-License-Identifier: Apache-2.0
"""The conformance runner refutes the merge of prefix chunks in the published sglang 0.5.23, and
proves it once mended. `sglang_chunked_prefix` says which parts are sglang's own."""

from functools import partial

import pytest

from cpattn_proof import Report, conform
from support.proof.shipped import assert_proved, assert_refuted_as_written, shipped_entry
from support.sglang import sglang_chunked_prefix
from support.sglang.installed import MARKS

pytestmark = MARKS
ENTRY = ("sgl-project/sglang#35045", "conform")


@pytest.fixture(scope="module", autouse=True)
def sglang():
    return sglang_chunked_prefix.load()


def tried(*without: str, mended: bool) -> Report:
    operator = partial(sglang_chunked_prefix.attention, mended=mended)
    operator.__name__ = "sglang 0.5.23"  # type: ignore[attr-defined]
    options = {"signature": sglang_chunked_prefix.SIGNATURE, "examples": 0, "seconds": 8}
    return conform(operator, without=without, **options)


def test_35045_parts_are_merged_to_another_base():
    report = tried(mended=False)
    assert_refuted_as_written(report, shipped_entry(*ENTRY))
    assert {found.kind for found in report.findings} <= {"merge-wrong-base", "lse-base-2"}


def test_35045_with_base_e_parts_are_the_whole(monkeypatch):
    entry = shipped_entry(*ENTRY)
    assert_proved(tried(mended=True), entry)
    # Chunks have a few tokens each; merging 500 results rounded to 16 bits would be inaccurate.
    monkeypatch.setenv("SGLANG_MAX_KV_CHUNK_CAPACITY", "9")
    assert_proved(tried("float16", "bfloat16", mended=True), entry)
