# SPDX-License-Identifier: Apache-2.0
"""``python -m cpattn`` runs the `cpattn` command of the distribution `cpattn-proof`."""

import sys
from importlib.util import find_spec

if __name__ == "__main__":  # spawned workers import the main module again
    if find_spec("cpattn_terminal") is None:
        sys.exit(
            "cpattn: the command is of cpattn-proof, which is not installed: pip install "
            "./python/distributions/cpattn-proof in the folder of cpattn's sources"
        )
    from cpattn_terminal.main import main

    main()
