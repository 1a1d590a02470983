# SPDX-License-Identifier: Apache-2.0
"""Preparations before sglang is imported on a CPU; as a program, sglang's server.

    python -m bench.serving.sglang_process serve --attention-backend=BACKEND [more of sglang serve]

Processes that sglang starts run the top of the program again with the same arguments.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path

#: In the order of their turns.
BACKENDS = ("torch_native", "cpattn")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1"}


def install(backend: str) -> None:
    """Install the stand-ins of sglang's CPU engine and, for cpattn, the plug-in's backend."""
    from cpattn.integrations.sglang import cpu_engine

    cpu_engine.install()
    if backend == "cpattn":
        from cpattn.integrations import sglang as plugin

        plugin.install("attention")


def started_by(pid: int) -> list[int]:
    """The processes of sglang to end with one process; their memory is no longer shared.

    At its end sglang also kills Python's process that would free that memory, so this function
    removes the memory from /dev/shm: processes that have it mapped keep it. Python's process is not
    listed.
    """
    import psutil  # type: ignore[import-untyped]  # where sglang is

    started = []
    with contextlib.suppress(psutil.NoSuchProcess):
        owner = psutil.Process(pid)
        for process in (owner, *owner.children(recursive=True)):
            with contextlib.suppress(OSError, psutil.NoSuchProcess):  # it has ended
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                for line in maps.splitlines():
                    name = line.rpartition(" ")[2]
                    if name.startswith("/dev/shm/sgl"):
                        Path(name).unlink(missing_ok=True)
                if process is not owner and "resource_tracker" not in " ".join(process.cmdline()):
                    started.append(process.pid)
    return started


if __name__ in {"__main__", "__mp_main__"}:
    install("cpattn" if "--attention-backend=cpattn" in sys.argv else "torch_native")
if __name__ == "__main__":
    sys.argv[0] = "sglang"
    importlib.import_module("sglang.cli.main").main()
