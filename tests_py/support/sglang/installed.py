# SPDX-License-Identifier: Apache-2.0
"""Helpers that tests of an installed sglang share."""

from importlib.util import find_spec

import pytest

MARKS = [
    pytest.mark.skipif(find_spec("sglang") is None, reason="sglang is not installed"),
    pytest.mark.engine("sglang"),
]
