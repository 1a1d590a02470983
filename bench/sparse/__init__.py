# SPDX-License-Identifier: Apache-2.0
"""Parts of bench_sparse.py: one module for each part of sparse attention.

A module has ``comparisons(quick)``, which gives the `Comparison` objects of its part.
"""

from __future__ import annotations

from cpattn import _core

THREADS = _core.default_num_threads()  # before anything sets another number
