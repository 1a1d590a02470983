# SPDX-License-Identifier: Apache-2.0
"""Serving traffic replayed through context-parallel prefill: `cpattn replay`.

``trace``         requests, read from a file or generated, and the tokens they stand for
``prefix_cache``  pages of a KV pool, shared through hash blocks, evicted least recently used first
``scheduler``     prefill batches under a token budget
``model``         a small decoder with random weights; its attention is a callable
``worker``        one context-parallel rank
``baseline``      the same attention by torch, after gathering the pages
``check``         the same prompts in one process, without context parallelism and without cache
``driver``        the loop over batches
``records``       what a replay is told, and what it writes down
``processes``     the ranks' processes: started together, ended together
``report``        what was measured, as a table and as JSON
``page``          the same as HTML, with ``plots``

The first three need NumPy only; the others import torch and the rest of ``cpattn[cli]``.
"""
