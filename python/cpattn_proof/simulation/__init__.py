# SPDX-License-Identifier: Apache-2.0
"""All ranks of a program of `torch.distributed` in one process, one at a time.

``simulate``         runs a function or a script in several orders; the report
``scheduler``        ranks as threads that pass a baton on
``process``          what is replaced in torch and Python meanwhile, and what each rank has alone
``process_group``    the groups that programs get: what each call gives and takes
``fabric``           which calls belong together, ``differences`` what they disagree in
``memory``           what tensors of a call have to be like, ``in_flight`` between it and its wait
``stuck``            why nobody can go on
``comparison``       whether results depend on the order of arrival
``recorded``         issues recorded ``steps`` again, or those ``remade`` for other ranks
``link``, ``timeline``   what time messages take
"""

from .recorded import simulate_capture
from .simulate import simulate, simulate_script

__all__ = ["simulate", "simulate_capture", "simulate_script"]
