# SPDX-License-Identifier: Apache-2.0
"""A model with dense attention over grouped heads: ``kind = "dense"``.

``model`` is the decoder's part of it, and where to start; ``attention`` what a rank keeps of the
tokens, and its calls of the library; ``decode`` a decode step; ``baseline`` the same by torch;
``check`` the same prompts in one process, the frame of all checks. Imports torch, `cpattn.kv` and
`cpattn.distributed`.
"""
