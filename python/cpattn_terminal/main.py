# SPDX-License-Identifier: Apache-2.0
"""The `cpattn` command: runs `commands`, or reports missing packages in one line."""

from __future__ import annotations

import gc
import signal
import sys
import traceback

from . import streams
from .distributions import how_to_install
from .exit_codes import CANNOT_TELL, INTERRUPTED

EXTRA_PACKAGES = ("click", "hypothesis", "jinja2", "jsonschema", "matplotlib", "rich", "torch")


def _end(number: int, _: object) -> None:
    """Raise SystemExit, like other errors, so that the command's processes and files end."""
    sys.exit(128 + number)


def main() -> None:
    """Entry point of the `cpattn` script and of ``python -m cpattn``."""
    streams.prepare()
    for name in ("SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
        number = getattr(signal, name, None)
        # nohup ignores one of them.
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)
    try:
        from .command_group import OWN_PROCESS
        from .commands import commands

        commands(prog_name="cpattn", obj=OWN_PROCESS)
    except Exception as error:
        name = (getattr(error, "name", None) or "").partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and name in EXTRA_PACKAGES:
            sys.exit(f"cpattn: {name} is not installed: pip install {name}")
        if isinstance(error, ModuleNotFoundError) and error.name == "cpattn":
            sys.exit("cpattn: its library is not installed: " + how_to_install("cpattn"))
        traceback.print_exc()  # a fault of the command must not exit with 1, a verdict
        sys.exit(CANNOT_TELL)
    except KeyboardInterrupt:  # during imports; later `CommandGroup` handles it
        print("cpattn: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    finally:
        gc.freeze()  # else Python would scan all objects of torch once more
