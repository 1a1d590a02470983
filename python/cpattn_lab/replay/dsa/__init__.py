# SPDX-License-Identifier: Apache-2.0
"""A model with the sparse attention of DeepSeek-V3.2 (DSA): ``kind = "dsa"``.

``model`` is the decoder's part of it, and where to start; ``attention`` what a rank keeps of the
tokens, over ``pools`` or, of rows of 656 bytes, ``fp8``; ``decode`` a decode step; ``baseline``
the same by torch; ``check`` the choice of keys and attention to them in one process. Imports torch,
`cpattn.sparse`, and ``dense`` for what is common.
"""
