# SPDX-License-Identifier: Apache-2.0
"""``torchrun -m cpattn_lab.check`` checks the started ranks."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
