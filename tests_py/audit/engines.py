# SPDX-License-Identifier: Apache-2.0
"""The table of ``make test-engines``: in which engines tests passed, in which environment.

    python -m audit.engines FOLDER

FOLDER is that of --records of some runs.
"""

import sys
from pathlib import Path

from audit.records import read
from audit.table import lines


def main(folder: str) -> int:
    engines = [record for record in read(Path(folder)) if record.kind == "engine"]
    print("\n".join(["What ran, and how many tests passed:", *lines(engines)]))
    return 0 if engines else f"audit.engines: no test in {folder} ran in an engine"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
