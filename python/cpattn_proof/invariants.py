# SPDX-License-Identifier: Apache-2.0
"""Invariants of context-parallel code, whatever engine or device it is of."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Invariant:
    """Something that has to hold.

    Attributes
    ----------
    id : str
        Two to six capital letters.
    rule : str
        What holds, as a sentence.
    matters : str
        What users see where it does not hold, as a sentence.
    advice : str
        Where to look first, as a sentence.

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
        """Place in the documents that says more, relative to the sources."""
        return f"docs/proof/invariants.md#{self.id.lower()}"


_ALL = (
    Invariant(
        "OWN",
        "Every token, head and slot has one owner, and its position travels with it.",
        "Rows are lost, computed twice or attended to at a wrong position: fluent nonsense.",
        "Compare the arithmetic that cuts with the one that puts together again.",
    ),
    Invariant(
        "COV",
        "Every pair of a query and a key that it may see is counted once, over all ranks.",
        "A query misses keys, or weighs some of them twice: answers drift with length.",
        "Look at the lengths and masks of the segments around the first pair.",
    ),
    Invariant(
        "LEN",
        "Lengths and pages of a rank are its own, in bounds, and sum to those of the sequence.",
        "Kernels read pages of other sequences, or memory that nobody wrote.",
        "Find where lengths of the whole sequence are used in place of those of the rank.",
    ),
    Invariant(
        "LSE",
        "Merged partial results equal the softmax over all keys.",
        "Parts weigh wrongly against each other, and empty ones give NaN.",
        "Check the base of the logarithm, -inf of rows without keys, and that sinks count once.",
    ),
    Invariant(
        "SEQ",
        "Ranks of a group issue the same collectives, of the same sizes, in the same order.",
        "Ranks wait for each other until a timeout, or take one tensor for another.",
        "Find the branch before the first difference that depends on what one rank alone knows.",
    ),
    Invariant(
        "XFER",
        "Each layer, kind, head and page is sent once, to its own place, within registered memory.",
        "The receiver decodes from rows of other layers or heads, or its memory is overwritten.",
        "Compare the item lengths and the pairing of entries on the two sides.",
    ),
    Invariant(
        "LAYOUT",
        "Who writes a cache and who reads it agree on the order of its bytes, dtype and scales.",
        "Heads, tokens or tiles are taken for each other: noise, or one token for ever.",
        "Give each order a name, and refuse a buffer whose name is another one.",
    ),
    Invariant(
        "TOPK",
        "What ranks select together is the top-k of all keys.",
        "Sparse attention reads the wrong tokens, the more so the longer the prompt.",
        "Check whether indices are positions of the sequence or of the rank where they are used.",
    ),
    Invariant(
        "ADDR",
        "No address overflows 32 bits, and nothing is written outside of what it belongs to.",
        "Long contexts crash, or overwrite what belongs to others.",
        "Make offsets 64 bits wide before the product, and buffers as large as the largest batch.",
    ),
    Invariant(
        "PAD",
        "Padding changes nothing.",
        "Results of a request change with what shares its batch.",
        "Find where rows or keys of padding are counted, read or written.",
    ),
    Invariant(
        "BAL",
        "Work is even over ranks within the stated bound.",
        "Every rank waits for the slowest: more machines do not help.",
        "Count pairs of queries and keys, not tokens, when sharing out.",
    ),
    Invariant(
        "RES",
        "Results are those that the program itself demands.",
        "An assertion of the program fails on one rank, whatever its calls look like.",
        "Compare the operands of the assertion on this rank with those on others.",
    ),
)

#: By id, in the order of the documents.
INVARIANTS = MappingProxyType({invariant.id: invariant for invariant in _ALL})
