# SPDX-License-Identifier: Apache-2.0
"""Rows that go astray between layers of two kinds are found; random plans test right ones."""

import numpy as np
import pytest

import cpattn
from cpattn.context_parallel.halo import plan_relayout
from cpattn_proof import lint
from cpattn_proof.linting.adapters.relayouts import from_relayouts


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ({"send_indices": [1, 0, *range(2, 7)]}, "cov-pair"),
        ({"send_counts": [3, 4]}, "seq-size"),
        ({"recv_indices": [0, 0, *range(2, 7)]}, "own-token"),
    ],
)
def test_rows_that_go_astray_are_found(fault, kind):
    source, target = (
        cpattn.build_cp_metadata_all_ranks([14], [17], cp_size=2, strategy=strategy)
        for strategy in ("contiguous", "zigzag")
    )
    plans = [plan_relayout(*pair) for pair in zip(source, target, strict=True)]
    plans[0] = plans[0]._replace(**{name: np.array(value) for name, value in fault.items()})
    found = lint(from_relayouts(plans, source, target, [14], [3])).findings
    assert kind in [one.kind for one in found], found
