# SPDX-License-Identifier: Apache-2.0
"""Path and digest of the real request trace, which is not part of the sources."""

import hashlib
import os
from pathlib import Path

# First 4,000 requests of the conversation trace that came with Mooncake's paper at FAST '25.
SHA256 = "be0ef5d206e09154731b4fde85d7608dad55fdce743b37817f7c2c1959463b9e"


def find() -> Path | None:
    """Return the file that CPATTN_TRACE names; if it does not exist, reading it fails later."""
    given = os.environ.get("CPATTN_TRACE")
    return Path(given) if given else None


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
