# SPDX-License-Identifier: Apache-2.0
"""Invariants of context-parallel code, for any engine or device."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Invariant:
    """A rule that context-parallel code must obey.

    Attributes
    ----------
    id : str
        Two to six capital letters.
    rule : str
        The rule, as a sentence.
    matters : str
        Symptom that users see if the rule is broken, as a sentence.
    advice : str
        Advice on the first place to look, as a sentence.

    Examples
    --------
    >>> INVARIANTS["OWN"].id
    'OWN'
    """

    id: str
    rule: str
    matters: str
    advice: str

    @property
    def page(self) -> str:
        """Section of the documents on this invariant, relative to the sources."""
        return f"docs/proof/invariants.md#{self.id.lower()}"


_ALL = (
    Invariant(
        "OWN",
        "Every token, head and slot has one owner, and its position travels with it.",
        "Rows are lost, computed twice or attended to at a wrong position: fluent nonsense.",
        "Compare the code that splits tokens over ranks with the code that reassembles them.",
    ),
    Invariant(
        "COV",
        "Every pair of a query and a key that it may see is counted once, over all ranks.",
        "A query misses keys, or counts some keys twice: answers drift with length.",
        "Check lengths and masks of the segments around the first reported pair.",
    ),
    Invariant(
        "LEN",
        "Lengths and pages of a rank are its own, in bounds, and sum to those of the sequence.",
        "Kernels read pages of other sequences, or uninitialized memory.",
        "Find code that uses lengths of the whole sequence instead of lengths of the rank.",
    ),
    Invariant(
        "LSE",
        "Merged partial results equal the softmax over all keys.",
        "Partial results get wrong weights, and empty ones give NaN.",
        "Check the base of the logarithm, -inf for rows without keys, and that sinks count once.",
    ),
    Invariant(
        "SEQ",
        "Ranks of a group issue the same collectives, of the same sizes, in the same order.",
        "Ranks wait for each other until a timeout, or mistake one tensor for another.",
        "Find the branch before the first difference that depends on data of one rank only.",
    ),
    Invariant(
        "XFER",
        "Each layer, kind, head and page is sent once, to its own place, within registered memory.",
        "The receiver decodes from rows of wrong layers or heads, or its memory is overwritten.",
        "Compare item lengths and the pairing of buffers on both sides.",
    ),
    Invariant(
        "LAYOUT",
        "Writer and reader of a cache agree on the order of its bytes, dtype and scales.",
        "Reads mix up heads, tokens or tiles: noise, or the same token forever.",
        "Give each layout a name, and reject buffers with another layout name.",
    ),
    Invariant(
        "TOPK",
        "Ranks together select the top-k of all keys.",
        "Sparse attention reads wrong tokens; longer prompts get worse answers.",
        "Check whether code takes indices as positions in the sequence or on the rank.",
    ),
    Invariant(
        "ADDR",
        "No address overflows 32 bits, and no write goes outside of its buffer.",
        "Long contexts crash, or overwrite memory of other buffers.",
        "Cast offsets to 64 bits before multiplying; size buffers for the largest batch.",
    ),
    Invariant(
        "PAD",
        "Padding changes nothing.",
        "Results of a request depend on the other requests in its batch.",
        "Find code that counts, reads or writes padding rows or keys.",
    ),
    Invariant(
        "BAL",
        "Work is even over ranks within the stated bound.",
        "Every rank waits for the slowest: more machines do not help.",
        "Balance pairs of queries and keys, not tokens.",
    ),
    Invariant(
        "RES",
        "Results are those that the program itself demands.",
        "An assertion of the program fails on one rank, even if all calls look right.",
        "Compare the operands of the assertion on this rank with those on other ranks.",
    ),
)

#: By id, in the order of the documents.
INVARIANTS = MappingProxyType({invariant.id: invariant for invariant in _ALL})
