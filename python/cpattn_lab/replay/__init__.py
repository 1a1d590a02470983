# SPDX-License-Identifier: Apache-2.0
"""Serving traffic replayed through context-parallel prefill: `cpattn replay`.

``command``         the options of the command, and the memory that they need (``footprint``)
``driver``          the loop over batches: where to start
``rank``            one rank of a pipeline stage, context-parallel with the others of it
``model``           a small decoder with random weights; its attention is of ``dense`` or ``dsa``
``shards``          which rank's pool holds which keys; ``comparison`` with replicated pools
``pools``           KV pools before anything is written
``messages``        what the ranks' processes are told, and say
``disaggregation``  the decode processes, and what is sent to them
``side_by_side``    what the check computes at once
``phases``          where the time of a pass goes
``records``         what a replay is told, and what it writes down; ``report`` shows it

Imports torch, rich, jinja2 and matplotlib. Requests: `cpattn_lab.traffic`; batches:
`cpattn.scheduling`.
"""
