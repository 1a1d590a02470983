# SPDX-License-Identifier: Apache-2.0
"""`cpattn doctor`: what this machine and environment will do, and what is missing for what.

``finding``      a line of the report, and how good it is
``machine``      processor, threads and memory
``environment``  Python, torch and its guard, engines, plug-ins, extras
``self_test``    attention on every instruction set against the oracle, in a process of its own
``report``       all of it as text, and as JSON

Imports NumPy only; engines are looked up by their metadata, as importing one takes seconds.
"""
