# SPDX-License-Identifier: Apache-2.0
"""The installed sglang for tests that call it in their own process."""

from types import SimpleNamespace

import pytest


@pytest.fixture(scope="module")
def sglang() -> SimpleNamespace:
    """The parts of it that plan."""
    from support.sglang import sglang_planning  # needs torch and sglang

    return sglang_planning.load()
