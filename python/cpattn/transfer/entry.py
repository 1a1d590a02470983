# SPDX-License-Identifier: Apache-2.0
"""A buffer of a KV cache, with what it holds."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["KVEntry"]


class KVEntry(NamedTuple):
    """A registered buffer: the pages of one kind of one layer.

    Attributes
    ----------
    layer_id : int
        Of the whole model, whatever stage or subset of layers is here; draft layers count from
        0 again.
    kind : str
        "k", "v", "index_k", "state", "k_scale" or "v_scale". An MLA latent is "k", its rope part
        "v"; scales of codes, one for each token and head, are "k_scale" and "v_scale".
    is_draft : bool
        Of a draft (MTP, EAGLE) model.
    addr, nbytes : int
        Where it is, and how many bytes it has.
    item_len : int
        Bytes of a page. 0, and no `nbytes`, if this side left the buffer out, as it may "index_k"
        and "state": for layers that use the top-k of an earlier one. Nothing is sent for a pair of
        which either side is left out.
    token_rows : bool
        Whether a page is a row for each of its tokens, in order. If not (pages of FP8 index
        keys with their scales behind), pages are sent whole or the plan is refused.
    dtype : str
        What the bytes are, such as "int8"; "" if nobody says. Where both sides of a transfer say
        it they must agree.

    Examples
    --------
    >>> entry = KVEntry(layer_id=3, kind="k", is_draft=False, addr=4096, nbytes=4608, item_len=512)
    >>> entry.nbytes // entry.item_len  # pages
    9
    >>> entry.token_rows
    True
    """

    layer_id: int
    kind: str
    is_draft: bool
    addr: int
    nbytes: int
    item_len: int
    token_rows: bool = True
    dtype: str = ""


KVEntry.__module__ = "cpattn.transfer"
