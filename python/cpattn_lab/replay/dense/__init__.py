# SPDX-License-Identifier: Apache-2.0
"""Model with dense attention over grouped heads: ``kind = "dense"``.

``model`` has the decoder; start there. ``attention`` has the pools of a rank and its calls of the
library, ``decode`` a decode step, and ``baseline`` attention by torch; ``check`` recomputes prompts
in one process, and is the base of all checks. Imports torch, `cpattn.kv` and `cpattn.distributed`.
"""
