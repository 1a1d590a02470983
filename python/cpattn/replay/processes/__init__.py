# SPDX-License-Identifier: Apache-2.0
"""Processes of a replay, or of a measurement: started together, ended together.

    with Workers([Role("a worker", "package.module.Class", 0, config)]) as workers:
        workers.call([0], "method")
        (answer,) = workers.answers([0])

``workers`` starts and ends them; ``messages`` has what ranks are told and say; ``memory`` what a
process has held. Imports no torch: a worker sets its environment before it imports its role.
"""

from .messages import Role
from .workers import WorkerError, Workers

__all__ = ["Role", "WorkerError", "Workers"]
