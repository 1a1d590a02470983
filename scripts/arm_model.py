# SPDX-License-Identifier: Apache-2.0
"""Model the innermost loops of the NEON kernels on Arm's Neoverse cores, which nobody has timed.

    cmake --workflow --preset aarch64      # compiles the kernels
    python scripts/arm_model.py build/aarch64 --openblas libscipy_openblas64.so

Prints the tables of docs/figures/arm.md: loops of the kernels, and those of arm_loops.c, which no
kernel has, beside them. llvm-mca counts the cycles of a loop that waits for nothing: all it loads
is in L1, and branches are foreseen. `--openblas` is a library for aarch64, as NumPy's wheels have
it, whose product of matrices is counted, too.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

CORES = {"neoverse-n2": 2, "neoverse-v1": 4, "neoverse-v2": 4}  # products of 128 bits a cycle
SVE_VECTORS = {"neoverse-n2": 1, "neoverse-v1": 2, "neoverse-v2": 1}  # of 128 bits
PRODUCTS = ("fmla", "fmad", "bfdot", "bfmmla", "sdot", "smmla")
_ITERATIONS = 200
_LOOPS = "cpp/CMakeFiles/cpattn_isa_{0}.dir/kernels/isa/{1}_{0}.cc.o"

# Each loop: its purpose, instruction set, file and function, and the work of one round.
LOOPS = [
    ("prefill, float32", "neon", "dense", "rows<Float32Engine, 4", "6 × 16, 1 deep"),
    ("prefill, bfloat16", "neonbf16", "dense", "rows<Bfloat16PairEngine, 4", "6 × 16, 4 deep"),
    ("indexer, bfloat16", "neonbf16", "sparse", "FloatScores<Bfloat16Engine", "4 × 16, 2 deep"),
    ("indexer, float32", "neon", "sparse", "FloatScores<Float32Engine", "4 × 16, 1 deep"),
    ("indexer, int8", "neonbf16", "sparse", "<Int8DotEngine", "4 × 16, 4 deep"),
    ("softmax, float32", "neon", "dense", "softmax_steep_row<6", "8 scores"),
    ("softmax, bfloat16", "neonbf16", "dense", "softmax_steep_row<4, Bf", "8 scores"),
    ("decode, scores", "neon", "dense", "InPlaceLoop<.*::score_tile", "4 keys × 4 rows, 4 deep"),
    ("decode, float32 values", "neon", "dense", ", float>::add_values", "16 × 4 rows"),
    ("decode, bfloat16 values", "neon", "dense", ", Bfloat16>::add_values", "16 × 4 rows"),
    ("decode, int8 values", "neon", "dense", "signed char>::add_values", "16 × 4 rows"),
    ("decode, e4m3 values", "neon", "dense", "Float8>::add_values", "16 × 4 rows"),
]

# Functions of arm_loops.c: what they stand for, rounds of it in one of theirs, and their name.
OTHERS = [
    ("prefill, float32", 1, "FMLA of SVE", "sve_float32"),
    ("prefill, bfloat16", 1, "BFMMLA of SVE", "sve_bfloat16"),
    ("softmax, float32", 1, "FEXPA of SVE", "sve_softmax"),
    ("softmax, bfloat16", 1, "FEXPA of SVE", "sve_softmax"),
    ("decode, int8 values", 1, "LD1SB of SVE", "sve_int8_values"),
    ("indexer, float32", 4, "SDOT", "neon_sdot"),
    ("indexer, int8", 2, "SMMLA (I8MM)", "neon_smmla"),
]


@dataclass(frozen=True)
class Loop:
    """A loop without a branch but its last instruction."""

    function: str
    lines: tuple[str, ...]  # instructions

    @property
    def num_products(self) -> int:
        return sum(line.split()[0] in PRODUCTS for line in self.lines)


def loops_of(disassembly: str) -> Iterator[Loop]:
    """Yield the innermost loops that multiply, of the output of objdump."""
    for part in re.split(r"\n(?=[0-9a-f]+ <)", disassembly):
        head = re.match(r"[0-9a-f]+ <(.*)>:\n", part)
        found = re.findall(r"^ *([0-9a-f]+):\s+(.*?)\s*(?://.*)?$", part, re.MULTILINE)
        if head is None:
            continue
        name = re.sub(r"\(anonymous namespace\)::|cpattn::kernels::", "", head[1])
        places = {int(address, 16): i for i, (address, _) in enumerate(found)}
        starts = [0] + [i + 1 for i, (_, line) in enumerate(found) if _is_branch(line)]
        for start, end in pairwise(starts):
            target = re.search(r"([0-9a-f]+) <", found[end - 1][1])
            begin = places.get(int(target[1], 16), -1) if target else -1
            if start <= begin < end:
                loop = Loop(name, tuple(line for _, line in found[begin : end - 1]))
                if loop.num_products:
                    yield loop


def _is_branch(line: str) -> bool:
    return re.match(r"(b|b\..*|bl|blr|br|ret|cbn?z|tbn?z)\s|ret", line) is not None


def cycles_of(loop: Loop, core: str) -> float:
    """Return the cycles of one round."""
    code = "\n".join(re.sub(r"[0-9a-f]+ <.*>", ".", line) for line in loop.lines)
    command = ["llvm-mca-19", "-mtriple=aarch64", "-mattr=+bf16,+i8mm,+sve2", f"-mcpu={core}"]
    counted = subprocess.run(
        [*command, f"-iterations={_ITERATIONS}"],
        input=code, text=True, capture_output=True, check=True,
    )  # fmt: skip
    found = re.search(r"Total Cycles:\s+(\d+)", counted.stdout)
    assert found is not None
    return int(found[1]) / _ITERATIONS


def disassembled(path: Path, *options: str) -> str:
    command = ["aarch64-linux-gnu-objdump", "-d", "-C", "--no-show-raw-insn", *options, str(path)]
    return subprocess.run(command, text=True, capture_output=True, check=True).stdout


def other_loops() -> dict[str, Loop]:
    """The loops of arm_loops.c, compiled, by their functions."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "loops.o")
        command = ["aarch64-linux-gnu-gcc", "-std=c11", "-O3", "-march=armv8.6-a+sve2", "-c"]
        source = Path(__file__).with_name("arm_loops.c")
        subprocess.run([*command, str(source), "-o", str(path)], check=True)
        return {loop.function: loop for loop in loops_of(disassembled(path))}


def print_others(kernels: dict[str, Loop]) -> None:
    others = other_loops()
    print("| Loop | Instead |" + "".join(f" {core} |" for core in CORES))
    print("|---|---|" + "---|" * len(CORES))
    for label, rounds, what, function in OTHERS:
        cells = []
        for core in CORES:
            mine = rounds * cycles_of(kernels[label], core)
            vectors = SVE_VECTORS[core] if function.startswith("sve") else 1
            other = cycles_of(others[function], core) / vectors
            cells.append(f"{mine:.1f} → {other:.1f} ({other / mine:.2f})")
        print(f"| {label} | {what} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("build", type=Path, help="folder of the aarch64 preset")
    parser.add_argument("--openblas", type=Path, help="libscipy_openblas64.so for aarch64")
    given = parser.parse_args()
    rows = []
    for label, isa, file, function, work in LOOPS:
        path = given.build / _LOOPS.format(isa, file)
        loops = [x for x in loops_of(disassembled(path)) if re.search(function, x.function)]
        rows.append((label, work, max(loops, key=lambda x: x.num_products)))
    if given.openblas:
        kernel = "sgemm_kernel_NEOVERSEN2"
        loops = list(loops_of(disassembled(given.openblas, f"--disassemble={kernel}")))
        rows.append(("OpenBLAS, float32", kernel, max(loops, key=lambda x: x.num_products)))
    print("| Loop | One round | Products |" + "".join(f" {core} |" for core in CORES))
    print("|---|---|---|" + "---|" * len(CORES))
    for label, work, loop in rows:
        cells = []
        for core, pipes in CORES.items():
            cycles = cycles_of(loop, core)
            cells.append(f"{cycles:.1f} ({loop.num_products / cycles / pipes:.0%})")
        print(f"| {label} | {work} | {loop.num_products} | {' | '.join(cells)} |")
    print()
    print_others({label: loop for label, _, loop in rows})


if __name__ == "__main__":
    main()
