# SPDX-License-Identifier: Apache-2.0
"""Tools over cpattn that predict a prefill over many ranks, replay traffic and check machines.

``cost_model``  what context parallelism over many ranks will cost
``traffic``     requests of serving traffic, read from a file or generated
``replay``      requests served once more, over several processes on CPUs, and checked
``check``       ranks of several machines: does it work, and how fast? For `torchrun`
``processes``   worker processes, and hosts on one machine
``explain``     a plan as text
``rate_options``  measured rates as options of `cpattn plan`
``commands``    the subcommands `explain`, `plan` and `replay` of `cpattn`

The distribution is `cpattn-lab`; no engine imports it.
"""
