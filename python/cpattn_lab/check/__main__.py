# SPDX-License-Identifier: Apache-2.0
"""``torchrun -m cpattn_lab.check`` checks the ranks that it starts."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
