# SPDX-License-Identifier: Apache-2.0
"""`cpattn doctor` says what this machine and environment will do; `cpattn bind` starts ranks.

``finding``      a line of the report, with its severity
``machine``      processor, threads and memory
``topology``     sockets, cores and NUMA nodes
``binding``      CPUs of each rank of a host, for `cpattn bind`
``environment``  Python, torch and its guard, engines, plug-ins, extras
``self_test``    attention on every instruction set against the oracle, in a process of its own
``report``       all findings as text, and as JSON

Imports NumPy only; engines are found by their metadata, as importing one takes seconds.
"""
