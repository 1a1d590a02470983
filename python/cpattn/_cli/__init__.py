# SPDX-License-Identifier: Apache-2.0
"""The command line: ``cpattn`` and ``python -m cpattn``.

``cli``       the entry point, which says what is not installed
``commands``  ``explain``, ``plan``, ``replay`` and ``doctor``, with click
``doctor``    what ``doctor`` looks at

The others are for both: how commands end (``command_group``) and what they take (``options``).
Imports all of the package, but commands only when they run; no other part imports from here.
"""
