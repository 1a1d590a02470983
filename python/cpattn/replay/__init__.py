# SPDX-License-Identifier: Apache-2.0
"""Serving traffic replayed through context-parallel prefill: `cpattn replay`.

``trace``         requests, read from a file or generated, and the tokens they stand for
``prefix_cache``  pages of a KV pool, shared through hash blocks, evicted least recently used first
``scheduler``     prefill batches under a token budget
``model``         a small decoder with random weights, and its dense attention
``dsa_model``     the sparse attention of DeepSeek-V3.2 in its place
``worker``        one rank of a pipeline stage, context-parallel with the others of it
``dense_attention``, ``dsa_attention`` (with ``dsa_pools``, ``dsa_fp8``)
                  what a rank keeps of the tokens, and the calls of the library over it
``baseline``, ``dsa_baseline``
                  the same attention by torch
``check``, ``dsa_check``
                  the same prompts in one process, without context parallelism and without cache
``phases``        where the time of a pass goes
``handover``      which pages a decode pool gets when, and ``kv_link``, which sends them
``decode``        the decode process, which continues the prompts, and ``decode_check``;
                  ``dsa_decode`` for sparse attention
``disaggregate``  the driver's part of that
``driver``        the loop over batches
``records``       what a replay is told, and what it writes down
``processes``     the ranks' processes: started together, ended together
``report``        what was measured, as a table and as JSON, with ``decode_report``
``page``          the same as HTML, with ``plots``

The first three need NumPy only; the others import torch and the rest of ``cpattn[cli]``.
"""
