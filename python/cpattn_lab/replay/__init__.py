# SPDX-License-Identifier: Apache-2.0
"""Replay of serving traffic through context-parallel prefill: `cpattn replay`.

``command``         options of the command, and their memory (``footprint``)
``driver``          loop over batches; start here
``rank``            one rank of a context-parallel pipeline stage
``model``           small decoder with random weights; its attention is ``dense`` or ``dsa``
``shards``          placement of keys in the pools; ``comparison`` with replicated pools
``pools``           empty KV pools
``messages``        messages to and from the ranks' processes
``disaggregation``  decode processes, and data sent to them
``side_by_side``    parallel work of the check
``phases``          times of the parts of a pass
``records``         settings and results of a replay; ``report`` shows them

Imports torch, rich, jinja2 and matplotlib. Requests: `cpattn_lab.traffic`; batches:
`cpattn.scheduling`.
"""
