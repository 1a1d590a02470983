# SPDX-License-Identifier: Apache-2.0
"""What is left out of a right document leaves a right one; only then do small ones show faults."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("jsonschema")

from cpattn.proof import lint
from cpattn.proof.linting.shrinking import cut, without
from support.proof.plans import batches, document_of, with_cache


@given(batches(), st.data())
def test_a_right_plan_without_requests_is_right(batch, data):
    document = with_cache(document_of(*batch))
    count = len(batch[0])
    dropped = data.draw(st.sets(st.integers(0, count - 1), max_size=count - 1))
    small = without(document, dropped)
    assert len(small["requests"]) == count - len(dropped)
    assert lint(small).findings == ()


@given(batches(), st.data())
def test_a_right_plan_of_shorter_sequences_is_right(batch, data):
    document = document_of(*batch)
    document.pop("restore", None)
    request = data.draw(st.integers(0, len(batch[0]) - 1))
    length = data.draw(st.integers(0, batch[0][request]))
    small = cut(document, request, length)
    assert small is not None
    assert small["requests"][request]["extend"] == length
    assert lint(small).findings == ()


def test_parts_that_cannot_be_cut_are_left_whole():
    document = document_of([8], [0], 2)
    assert cut(document, 0, 4) is None  # how rows are put together would change
    document.pop("restore")
    assert cut(with_cache(document), 0, 4) is None
    assert cut(document, 0, 4) is not None


def test_smaller_documents_are_of_the_schema():
    """Without ranks where there were none."""
    merge = {"base": "e", "parts": [{"rank": 0, "base": "2"}]}
    requests = [{"extend": 1}, {"extend": 1}]
    document = {"schema": "cpattn-plan/1", "requests": requests, "merges": [merge]}
    (found,) = lint(document).findings
    (again,) = lint(found.details["smaller"]).findings
    assert again.kind == found.kind == "lse-base"
