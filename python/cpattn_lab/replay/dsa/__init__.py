# SPDX-License-Identifier: Apache-2.0
"""Model with the sparse attention of DeepSeek-V3.2 (DSA): ``kind = "dsa"``.

``model`` has the decoder; start there. ``attention`` has a rank's attention over ``pools`` or, with
rows of 656 bytes, ``fp8``; ``shards`` has it over a share of the keys, ``decode`` a decode step,
``baseline`` attention by torch, and ``check`` the check in one process. Imports torch,
`cpattn.sparse`, and the common parts from ``dense``.
"""
