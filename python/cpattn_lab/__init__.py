# SPDX-License-Identifier: Apache-2.0
"""Tools over cpattn that predict a prefill over many ranks, replay traffic and check machines.

``cost_model``  predicted cost of context parallelism over many ranks
``traffic``     requests of serving traffic, read from a file or generated
``replay``      serves requests again, over several processes on CPUs, and checks the results
``check``       correctness and speed of ranks on several machines, for `torchrun`
``processes``   worker processes, and hosts on one machine
``explain``     a plan as text
``rate_options``  measured rates as options of `cpattn plan`
``commands``    the subcommands `explain`, `plan` and `replay` of `cpattn`

The distribution is `cpattn-lab`; no engine imports it.
"""
