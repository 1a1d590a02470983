# SPDX-License-Identifier: Apache-2.0
"""``python -m cpattn_terminal`` runs the `cpattn` command."""

from .main import main

if __name__ == "__main__":  # spawned workers import the main module again
    main()
