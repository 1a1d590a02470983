# SPDX-License-Identifier: Apache-2.0
"""Tables and lists of indices in tensors of torch, in every layout these can have."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.api.index_calls import ARGUMENTS, Call, by_two, names_of, same_or_refused, transposed


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("layout", [np.copy, by_two, transposed])
@pytest.mark.parametrize(("call", "name"), ARGUMENTS, ids=names_of)
def test_a_view_is_as_good_as_a_copy(call: Call, name: str, layout, dtype) -> None:
    array = call.arrays[name].astype(dtype)
    view = torch.from_numpy(layout(array))
    same_or_refused(call, name, view, call.outcome(**{name: array}))


@pytest.mark.parametrize(("call", "name"), ARGUMENTS, ids=names_of)
def test_an_expanded_view_is_as_good_as_a_copy(call: Call, name: str) -> None:
    array = torch.from_numpy(call.arrays[name])
    view = array[:1].expand(array.shape)
    assert view.stride(0) == 0
    same_or_refused(call, name, view, call.outcome(**{name: view.numpy().copy()}))
