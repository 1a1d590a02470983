# SPDX-License-Identifier: Apache-2.0
"""Simulation of all ranks of a `torch.distributed` program in one process, one at a time.

``simulate``         runs a function or a script in several orders, and reports
``scheduler``        ranks as threads that take turns
``process``          temporary replacements in torch and Python, and the private state of each rank
``process_group``    groups of the programs: data given and taken in each call
``fabric``           matches calls of ranks; ``differences`` reports disagreements
``memory``           checks tensors of a call; ``in_flight`` checks them until its wait
``stuck``            explains deadlocks
``comparison``       tells whether results depend on the order of arrival
``recorded``         replays recorded ``steps``, or those ``remade`` for other ranks
``link``, ``timeline``   times of messages
"""

from .recorded import simulate_capture
from .simulate import simulate, simulate_script

__all__ = ["simulate", "simulate_capture", "simulate_script"]
