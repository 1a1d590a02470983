# SPDX-License-Identifier: Apache-2.0
"""Fixtures give sglang's own functions if its wheel is at hand."""

from types import SimpleNamespace

import numpy as np
import pytest


@pytest.fixture(scope="module")
def sglang() -> SimpleNamespace:
    from support.sglang import sglang_upstream  # only some tests here need torch

    return sglang_upstream.load_or_skip()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(23893)
