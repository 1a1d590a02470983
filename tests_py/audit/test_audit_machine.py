# SPDX-License-Identifier: Apache-2.0
"""Parts of this machine are found without the library; it must agree."""

import pytest

from audit import machine, skips, table
from cpattn import supported_isas

THERE = (
    "address space: 1 GiB", "command: sh", "instruction set: portable", "library: libc.so.6",
    "package: numpy", "python below: 4.0", "variable: PATH",
)  # fmt: skip
LACKING = (
    "address space: 1000000 GiB", "command: cpattn-nonsense", "cpus: 0,100000", "file: nonsense",
    "instruction set: mmx", "interpreter: 2.0", "library: libnonsense.so.1", "machine: z80",
    "never: anything", "package: cpattn_nonsense", "python below: 3.10", "release: numpy==0.0.1",
    "release: cpattn-nonsense==1.0", "variable: CPATTN_NONSENSE", "wheel of sglang: 0.0.0",
)  # fmt: skip


def test_the_library_finds_the_instruction_sets_that_the_processor_lists():
    expected = {name for name in machine.INSTRUCTION_SETS if machine.has_instruction_set(name)}
    assert set(supported_isas()) == expected


def test_what_a_machine_has():
    assert [need for need in THERE if not machine.has(need)] == []
    assert [need for need in LACKING if machine.has(need)] == []
    with pytest.raises(ValueError, match="'moon: full' is not '<kind>: <name>'"):
        machine.has("moon: full")


@pytest.mark.slow
def test_needs_of_the_list_can_be_looked_up():
    found = {"isa": "portable", "package": "pytest", "version": "0.5.9", "release": "pytest==8"}
    found |= {"archive": "build/outside/none.tar.gz", "command": "sh"}
    for entry in [*skips.read(), *table.parts()]:
        for need in entry.needs:
            assert machine.has(need.format(**found)) in (True, False)
