# SPDX-License-Identifier: Apache-2.0
"""All mutants of a file in one text: each is chosen while tests run, by its number.

A file is so compiled once, not once for each mutant, and the tests that reach a mutant are known.
"""

from __future__ import annotations

import re
from collections import defaultdict

from mutate.operators import Mutant

SWITCH = re.compile(r"\b_?cpattn_mutant\((\d+)\)")
_CPP = '#include "mutants.h"\n#line 1\n'
_PYTHON = "from cpattn_mutants import mutant as _cpattn_mutant"


def instrumented(source: bytes, mutants: dict[int, Mutant]) -> str:
    """The text with a switch at each place that a mutant changes; `mutants` by number."""
    is_cpp = any(mutant.path.endswith(".cc") for mutant in mutants.values())
    at: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, mutant in mutants.items():
        at[mutant.begin, -mutant.end].append(number)
    places = sorted(at)

    def render(begin: int, end: int, i: int) -> tuple[str, int]:
        text, position = "", begin
        while i < len(places) and places[i][0] < end:
            first, last = places[i][0], -places[i][1]
            inner, after = render(first, last, i + 1)
            text += source[position:first].decode()
            numbers = [(number, mutants[number]) for number in at[places[i]]]
            text += _switched(inner, numbers, is_cpp)
            position, i = last, after
        return text + source[position:end].decode(), i

    text, _ = render(0, len(source), 0)
    if is_cpp:
        return _CPP + text
    future = "from __future__ import annotations\n"
    assert text.count(future) == 1
    return text.replace(future, f"{future.strip()}; {_PYTHON}\n")


def _switched(original: str, numbers: list[tuple[int, Mutant]], is_cpp: bool) -> str:
    text = original
    for number, mutant in reversed([n for n in numbers if not n[1].is_statement]):
        if is_cpp:
            # Of a bool and a std::optional, say, the common type would be the other one.
            same = f"!!({text})" if mutant.mutated.startswith("!") else f"({text})"
            text = f"(::cpattn_mutant({number}) ? ({mutant.mutated}) : {same})"
        else:
            text = f"(({mutant.mutated}) if _cpattn_mutant({number}) else ({text}))"
    for number, mutant in [n for n in numbers if n[1].is_statement]:
        if is_cpp:
            text = f"{{ if (::cpattn_mutant({number})) {{ {mutant.mutated} }} else {{ {text} }} }}"
        else:
            indent = " " * mutant.column
            text = f"if _cpattn_mutant({number}): {mutant.mutated}\n{indent}else: {text}"
    return text
