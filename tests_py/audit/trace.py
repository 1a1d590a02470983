# SPDX-License-Identifier: Apache-2.0
"""The real request trace, which is not part of the sources: where it lies, and which one it is."""

import hashlib
import os
from pathlib import Path

# The first 4,000 requests of the conversation trace that came with Mooncake's paper at FAST '25.
SHA256 = "be0ef5d206e09154731b4fde85d7608dad55fdce743b37817f7c2c1959463b9e"


def find() -> Path | None:
    """The file that CPATTN_TRACE names; what it says is not there is an error where it is read."""
    given = os.environ.get("CPATTN_TRACE")
    return Path(given) if given else None


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
