# SPDX-License-Identifier: Apache-2.0
"""``python -m cpattn`` is the `cpattn` command."""

from ._cli.cli import main

if __name__ == "__main__":  # spawned workers import the main module again
    main()
