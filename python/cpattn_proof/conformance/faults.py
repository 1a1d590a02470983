# SPDX-License-Identifier: Apache-2.0
"""Faults with a name: meaning, broken invariant, and wrong oracles."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from .switches import RIGHT, Switches

_LN2 = math.log(2)
_SPLITS = ("new", "half", "page", "16", "32", "64", "128", "256", "512")
_COUNTS = (2, 3, 4, 5, 6, 7, 8, 16)
_CHUNKS = (16, 32, 64, 128)
_BEYOND = ("one", "page", "all")


@dataclass(frozen=True)
class Fault:
    """A named fault.

    Attributes
    ----------
    name : str
        Kind of the findings.
    invariant : str
        Broken invariant.
    means : str
        What the operator does, as the end of a sentence that begins with its name.
    advice : str
        Advice for the fix.
    variants : tuple
        Oracles with this fault; empty if another check finds it.
    """

    name: str
    invariant: str
    means: str
    advice: str
    variants: tuple[Any, ...] = ()


def _each(**choices: tuple[object, ...]) -> tuple[Switches, ...]:
    """Return `Switches` for each wrong position of a single switch."""
    ((name, values),) = choices.items()
    return tuple(replace(RIGHT, **{name: value}) for value in values)  # type: ignore[arg-type]


_MASKS = (
    Fault(
        "mask-top-left", "COV",
        "aligns the causal mask to the first query and the first key, not to the last ones",
        "Let query i see keys up to i + kv_len - q_len.",
        _each(mask=("top left",)),
    ),
    Fault(
        "mask-off-by-one", "COV",
        "shows a query one key too many or hides its own",
        "Compare positions by key <= query, both counted from the begin of the sequence.",
        _each(mask_shift=(-1, 1)),
    ),
    Fault(
        "mask-ignored", "COV",
        "has no causal mask",
        "Pass causal on, or refuse it.",
        _each(mask=("none",)),
    ),
    Fault(
        "mask-per-chunk", "COV",
        "aligns the causal mask anew for each chunk of queries",
        "Add to the row of a chunk what comes before it: the prefix, and the chunks before.",
        tuple(
            replace(RIGHT, chunk=chunk, chunk_mask=mask)
            for mask in ("prefix", "top left", "bottom right", "own keys")
            for chunk in _CHUNKS
        ),
    ),
    Fault(
        "window-off-by-one", "COV",
        "has windows that are one key too long or too short",
        "Find out whether the window counts the query's own key; flash-attn's does not.",
        (*_each(window_shift=(1, -1)), *_each(window_right_shift=(1, -1))),
    ),
    Fault(
        "window-ignored", "COV",
        "has no windows, or none behind a query",
        "Pass the window on, or refuse it.",
        (*_each(window=(False,)), *_each(window_right=(False,))),
    ),
    Fault(
        "window-whole-blocks", "COV",
        "begins windows with a whole block of keys",
        "Skipping blocks is not enough: mask the keys before the window in its first block.",
        _each(window_block=("page", *map(str, _CHUNKS))),
    ),
)  # fmt: skip

_LOG_SUMS = (
    Fault(
        "lse-base-2", "LSE",
        "returns the log-sum-exp to another base than its signature says",
        "Multiply by ln 2 where base 2 comes out and base e is promised.",
        _each(lse_factor=(1 / _LN2, _LN2)),
    ),
    Fault(
        "lse-unscaled", "LSE",
        "returns a log-sum-exp of scores, or with a maximum, that were not scaled",
        "Scale before the maximum is taken, or scale the maximum when it is added again.",
        _each(lse=("unscaled", "unscaled maximum")),
    ),
    Fault(
        "lse-with-sink", "LSE",
        "counts the sink in the log-sum-exp",
        "Leave it to the merge, once, or it will count once for each part.",
        _each(lse=("with sink",)),
    ),
    Fault(
        "lse-finite-on-empty", "LSE",
        "returns a finite log-sum-exp for rows that see no key",
        "Return -inf: a large negative number gives an empty part weight where all are empty.",
        _each(lse=("free on empty",)),
    ),
    Fault(
        "nan-on-empty", "LSE",
        "gives NaN for rows that see no key",
        "Divide by 1 where the sum of weights is 0, and take no difference of infinities.",
        (
            replace(RIGHT, empty="nan", lse="any on empty"),
            *_each(lse=("nan on empty",)),
        ),
    ),
    Fault(
        "mean-on-empty", "LSE",
        "gives the mean of hidden values for rows that see no key",
        "Hide by -inf, not by a large negative number, and give 0 where all keys are hidden.",
        tuple(
            replace(RIGHT, empty="mean", lse="any on empty", beyond=beyond)
            for beyond in ("", *_BEYOND)
        ),
    ),
)  # fmt: skip

_SCORES = (
    Fault(
        "alibi-ignored", "COV",
        "does not add the biases of ALiBi",
        "Pass slopes on, or refuse them.",
        _each(alibi=("none",)),
    ),
    Fault(
        "alibi-before-scale", "COV",
        "adds the biases of ALiBi to products that are not scaled yet",
        "Add them after the scale: slopes are of scores.",
        _each(alibi=("before scale",)),
    ),
    Fault(
        "alibi-top-left", "COV",
        "counts distances of ALiBi as if query i stood at key i",
        "Query i stands at key i + kv_len - q_len.",
        _each(alibi=("top left",)),
    ),
    Fault(
        "sink-ignored", "LSE",
        "leaves sinks out",
        "Pass them on: a signature with **kwargs swallows them.",
        _each(sinks=("none",)),
    ),
    Fault(
        "sink-per-part", "LSE",
        "counts sinks once for each part of the keys",
        "Count them in one part, or when parts are merged.",
        (
            *(replace(RIGHT, split=split) for split in _SPLITS),
            *_each(sink_count=_COUNTS),
        ),
    ),
    Fault(
        "softcap-ignored", "COV",
        "does not cap scores",
        "Pass the cap on, or refuse it.",
        _each(softcap=("none",)),
    ),
    Fault(
        "softcap-before-scale", "COV",
        "caps products before they are scaled",
        "Cap scale * q @ k; divide the cap by the scale if products are capped.",
        _each(softcap=("before scale",)),
    ),
    Fault(
        "scale-ignored", "COV",
        "does not use the scale that it is given",
        "Multiply q @ k by it; 1 / sqrt(head_dim) is the default only.",
        _each(scale=("none", "root")),
    ),
    Fault(
        "scale-twice", "COV",
        "applies the scale twice",
        "Scale the queries or the products, not both.",
        _each(scale=("twice",)),
    ),
    Fault(
        "gqa-head-order", "OWN",
        "gives query heads the KV heads in turn, not in groups",
        "Query head h has KV head h // (num_heads // num_kv_heads): repeat_interleave, not repeat.",
        _each(heads=("strided",)),
    ),
)  # fmt: skip

_LENGTHS = (
    Fault(
        "kv-len-without-new", "LEN",
        "takes lengths of keys without the new tokens",
        "Add the new tokens: queries attend to each other, too.",
        _each(lengths=("without new", "without new, aligned")),
    ),
    Fault(
        "kv-len-without-prefix", "LEN",
        "takes lengths of keys without the cached prefix",
        "Use the lengths of whole sequences for keys.",
        _each(lengths=("first", "last")),
    ),
    Fault(
        "reads-beyond-length", "LEN",
        "reads keys or values behind the last one of a sequence",
        "Mask by the length, and keep NaN of masked values out: 0 * NaN is NaN.",
        (
            *_each(beyond=_BEYOND),
            *(replace(RIGHT, beyond=b, beyond_aligned=True) for b in _BEYOND),
            *(replace(RIGHT, beyond=b, zero_times_nan=True) for b in _BEYOND),
        ),
    ),
    Fault(
        "pad-rows-read", "PAD",
        "takes rows of padding for tokens",
        "Take lengths from q_lens, not from the shape of q.",
        _each(pads=("queries", "keys")),
    ),
)  # fmt: skip

_MEMORY = (
    Fault(
        "page-size", "LEN",
        "looks up pages by another page size",
        "Use the page size of the cache in both the division and the remainder.",
        (
            *_each(page_size=("half", "double", "16", "32", "64", "128")),
            *(
                replace(RIGHT, page_size=size, page_stride="true")
                for size in ("half", "double", "16", "32", "64", "128")
            ),
        ),
    ),
    Fault(
        "page-order", "LEN",
        "takes pages in another order than that of the block table",
        "Follow the table: pages of a sequence are neither neighbours nor sorted.",
        _each(table=("ignored", "sorted", "reversed", "first page alone")),
    ),
    Fault(
        "batch-order", "OWN",
        "gives sequences the keys of others",
        "If sequences are sorted, sort lengths, tables and queries alike, and outputs back.",
        _each(order=tuple(
            f"{order}{lengths}"
            for order in ("reversed", "rolled", "longest first")
            for lengths in ("", " with lengths")
        )),
    ),
    Fault(
        "v-head-dim", "ADDR",
        "takes values to be as wide as keys",
        "Use v_head_dim for strides of values and for the output.",
        _each(values=("of key dim", "padded to key dim")),
    ),
    Fault(
        "layout-nhd-hnd", "ADDR",
        "takes pages of one layout for the other",
        "Tell NHD [page_size, heads, dim] from HND [heads, page_size, dim]; shapes may agree.",
        _each(layout=("swapped",)),
    ),
    Fault(
        "overflow-32-bit", "ADDR",
        "fails where offsets exceed 31 bits, and is right with the same pages nearer",
        "Make page * stride 64 bits wide before the product.",
    ),
    Fault(
        "page-id-16-bit", "ADDR",
        "fails where page ids exceed 16 bits, and is right with the same pages nearer",
        "Keep block tables in 32 bits all the way to the kernel.",
    ),
)  # fmt: skip

_MERGES = (
    Fault(
        "merge-wrong-base", "LSE",
        "merges parts by powers of another base than their log-sum-exp has",
        "Convert one of them: base-2 logarithms times ln 2 are natural ones.",
        tuple(
            replace(RIGHT, split=split, merge_factor=factor)
            for split in _SPLITS
            for factor in (1 / _LN2, _LN2)
        ),
    ),
    Fault(
        "merge-swapped", "LSE",
        "gives merged parts the weights of each other",
        "Multiply each output by the exponential of its own log-sum-exp.",
        tuple(
            replace(RIGHT, split=split, merge_swapped=True, nan_of_empty_part=which)
            for split in _SPLITS
            for which in ("", "any", "masked")
        ),
    ),
    Fault(
        "merge-nan", "LSE",
        "gives NaN where a part of the keys is empty",
        "Give a part with LSE -inf weight 0, and subtract the maximum only where it is finite.",
        tuple(
            replace(RIGHT, split=split, nan_of_empty_part=which)
            for split in _SPLITS
            for which in ("some", "any", "first", "later", "masked")
        ),
    ),
    Fault(
        "16-bit-accumulation", "COV",
        "adds up values in 16 bits: the more keys, the less each new one counts",
        "Accumulate in float32 and round once.",
    ),
)  # fmt: skip

_FORMS = (
    Fault(
        "crash", "ADDR",
        "ends its process",
        "Run the case under a debugger; addresses are the usual cause.",
    ),
    Fault("hang", "COV", "does not return", "Look for a wait that nobody answers."),
    Fault(
        "raises", "LEN",
        "raises an error for a batch that its signature allows",
        "Handle the batch; or refuse it by NotImplementedError or ValueError, which is respected.",
    ),
    Fault(
        "wrong-form", "ADDR",
        "returns something else than the tensors of its signature",
        "Return the output in the shape and the dtype of the queries, and the LSE in float32.",
    ),
    Fault(
        "changes-inputs", "ADDR",
        "changes its arguments",
        "Work on a copy, or write to the output: callers use queries and caches again.",
    ),
    Fault(
        "new-keys-unwritten", "OWN",
        "does not write new keys and values into the cache",
        "Write them at their positions before attention, or the next step has other keys.",
    ),
    Fault(
        "unknown", "COV",
        "differs from attention in no way that has a name",
        "See which rows, heads and keys differ.",
    ),
)  # fmt: skip

#: Faults by name. If several explain the same results, the first counts.
FAULTS = {
    fault.name: fault
    for fault in (*_MASKS, *_LOG_SUMS, *_SCORES, *_LENGTHS, *_MEMORY, *_MERGES, *_FORMS)
}
