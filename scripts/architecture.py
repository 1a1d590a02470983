# SPDX-License-Identifier: Apache-2.0
"""Draws docs/images: floors and rooms from cpp/layers.toml, packages from their imports, and how
work is divided, with the constants of the sources. `--check` writes nothing and fails where a
picture is not what it would write."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

from module_imports import names_in
from picture_files import write_pictures
from svg import LINE, WIDTH, Picture

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
PYTHON = ROOT / "python"
LAYERS: dict[str, Any] = tomllib.loads((ROOT / "cpp/layers.toml").read_text())
#: The floors whose sources keep the promises of a layer of headers.
# `limits` are constants, which nobody keeps.
KEEPERS = {
    "values": "base",
    "machine": "base",
    "meta": "meta",
    "ops": "ops",
    "reference": "reference",
}

# --- floors ------------------------------------------------------------------------------------

#: x, y, width, height of a floor.
PLACES = {
    "python/cpattn": (10, 10, 680, 62),
    "bindings": (10, 104, 470, 82),
    "c": (510, 104, 180, 82),
    "ops": (70, 222, 350, 100),
    "meta": (452, 222, 238, 134),
    "kernels": (70, 358, 350, 100),
    "reference": (452, 376, 170, 82),
    "base": (10, 494, 680, 62),
}
#: How an arrow from one floor to another runs.
ROUTES: Mapping[tuple[str, str], tuple[tuple[float, float], ...]] = {
    ("python/cpattn", "bindings"): ((245, 72), (245, 104)),
    ("bindings", "ops"): ((245, 186), (245, 222)),
    ("bindings", "meta"): ((466, 186), (466, 222)),
    ("c", "meta"): ((657, 186), (657, 222)),
    ("c", "ops"): ((530, 186), (530, 204), (400, 204), (400, 222)),
    ("c", "base"): ((690, 145), (697, 145), (697, 525), (690, 525)),
    ("bindings", "reference"): ((436, 186), (436, 417), (452, 417)),
    ("bindings", "base"): ((24, 186), (24, 494)),
    ("ops", "kernels"): ((245, 322), (245, 358)),
    ("ops", "meta"): ((420, 272), (452, 272)),
    ("ops", "base"): ((70, 272), (46, 272), (46, 494)),
    ("meta", "base"): ((657, 356), (657, 494)),
    ("reference", "base"): ((537, 458), (537, 494)),
}


def rooms_of(floor: str) -> list[str]:
    """The folders of a floor, as layers.toml orders them."""
    order = LAYERS["kernel_rooms" if floor == "kernels" else "rooms"]
    folders = {path.name for path in (ROOT / "cpp" / floor).iterdir() if path.is_dir()}
    return [room for room in order if room in folders] + sorted(folders - set(order))


def floors_known_to(floor: dict[str, Any]) -> set[str]:
    keepers = {KEEPERS[layer] for layer in floor["headers"] if layer in KEEPERS}
    return (keepers | set(floor.get("floors", ()))) - {floor["name"]}


def floors() -> str:
    picture = Picture("The floors of cpattn; an arrow says: includes and calls")
    arrows = {("python/cpattn", "bindings")}
    picture.rect(*PLACES["python/cpattn"], "warm")
    picture.text(20, 30, "python/cpattn", "bold")
    picture.paragraph(20, 34, 640, "allocates results, fills defaults, documents, talks to engines")
    for floor in LAYERS["floor"]:
        name = floor["name"]
        arrows |= {(name, other) for other in floors_known_to(floor)}
        x, y, w, h = PLACES[name]
        picture.rect(x, y, w, h, "cool" if name == "kernels" else "plain")
        picture.text(x + 10, y + 20, f"cpp/{name}", "bold")
        below = picture.paragraph(x + 10, y + 24, w - 16, floor["holds"])
        if rooms := rooms_of(name):
            below = picture.paragraph(x + 10, below, w - 16, "rooms: " + ", ".join(rooms), "soft")
        if below > y + h:
            raise ValueError(f"floors: {name} needs {below - y:g} pixels, has {h}")
    if arrows != ROUTES.keys():
        raise ValueError(f"floors: arrows without a route, or not needed: {arrows ^ ROUTES.keys()}")
    for points in ROUTES.values():
        picture.line(*points, arrow=True)
    return picture.finish()


# --- who may include whom ----------------------------------------------------------------------


def by_level(known: Mapping[str, set[str]]) -> list[str]:
    """What knows nothing first; in a circle, what knows least."""
    order: list[str] = []
    left = {name: set(others) for name, others in known.items()}
    while left:
        name = min(left, key=lambda name: (len(left[name] & left.keys() - {name}), name))
        del left[name]
        order.append(name)
    return order


def matrix(
    picture: Picture,
    x: float,
    y: float,
    names: list[str],
    known: Mapping[str, set[str]],
    later: Mapping[str, set[str]] | None = None,
) -> None:
    """A row for each name with a dot below each that it knows, a ring for those it knows `later`;
    (x, y) is its upper left cell."""
    cell = min(23.0, (WIDTH - 90 - x) / len(names))
    for i, name in enumerate(names):
        picture.text(x + i * cell + cell / 2 + 3, y - 6, name, turn=-50)
        picture.text(x - 8, y + i * cell + cell / 2 + 5, name, anchor="end")
        for j, other in enumerate(names):
            kind = "cool" if i == j else "page"
            picture.rect(x + j * cell, y + i * cell, cell, cell, kind)
            mark = "dot" if other in known[name] else "ring"
            if i != j and (mark == "dot" or other in (later or {}).get(name, ())):
                picture.rect(x + j * cell + cell / 2 - 4, y + i * cell + cell / 2 - 4, 8, 8, mark)
    for i in range(len(names) + 1):
        picture.line((x, y + i * cell), (x + len(names) * cell, y + i * cell))
        picture.line((x + i * cell, y), (x + i * cell, y + len(names) * cell))


def rooms() -> str:
    picture = Picture("Which room may include which")
    top = 0.0
    for title, table, everywhere in (
        ("of include, meta, ops, bindings", "rooms", {"base"}),
        ("of kernels", "kernel_rooms", set()),
    ):
        known = {room: {*others, *everywhere} for room, others in LAYERS[table].items()}
        picture.text(20, top + 22, f"rooms {title}", "bold")
        matrix(picture, 130, top + 140, by_level(known), known)
        top = picture.height + 8
    picture.paragraph(20, picture.height + 8, WIDTH - 40, "A dot: the room of its row may include "
                      "the room of its column.")  # fmt: skip
    return picture.finish()


# --- Python ------------------------------------------------------------------------------------


def imported(path: Path, later: bool) -> Iterator[tuple[str, ...]]:
    """The absolute names that a module imports: itself, or its functions."""
    package = path.relative_to(PYTHON).parent.parts
    tree = ast.parse(path.read_text())
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    inside = {id(node) for function in functions for node in ast.walk(function)}
    never = {
        id(line)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for line in node.body
    }
    for node in ast.walk(tree):
        if (id(node) in inside) == later and id(node) not in never:
            yield from names_in(node, package)


def part_of(parts: tuple[str, ...]) -> str:
    """Part of `cpattn` that a module is, or its package; what begins with _ are the foundations."""
    if parts[0] != "cpattn":
        return parts[0]
    name = parts[1].removesuffix(".py")
    return "foundations" if name.startswith("_") else name


def modules() -> Iterator[tuple[str, Path]]:
    """The modules of all packages with their parts, but for those of `cpattn` that know all."""
    for path in sorted(PYTHON.rglob("*.py")):
        inside = path.relative_to(PYTHON).parts
        if inside not in {("cpattn", "__init__.py"), ("cpattn", "__main__.py")}:
            yield part_of(inside), path


def known_parts(later: bool) -> dict[str, set[str]]:
    """The parts that each part imports at the top of its modules, or later, in functions."""
    known: dict[str, set[str]] = {part: set() for part, _ in modules()}
    for own, path in modules():
        for name in imported(path, later):
            if (len(name) > 1 or name[0] != "cpattn") and (other := part_of(name)) in known:
                known[own].add(other)
    return {own: others - {own} for own, others in known.items()}


def packages() -> str:
    picture = Picture("Which part of the Python packages imports which")
    known = known_parts(later=False)
    matrix(picture, 170, 130, by_level(known), known, known_parts(later=True))
    picture.paragraph(20, picture.height + 8, WIDTH - 40, "Filled: the part of its row imports the "
                      "part of its column when it is imported. Hollow: a function does so when it "
                      "is called. Foundations are the modules, and the compiled core, whose names "
                      "begin with _.")  # fmt: skip
    return picture.finish()


# --- how work is divided -----------------------------------------------------------------------


def constant(file: str, name: str) -> str:
    """The value of a constant as a source writes it."""
    found = re.search(rf"\b{name} = ([^;]+);", (ROOT / "cpp" / file).read_text())
    if found is None:
        raise ValueError(f"cpp/{file} has no {name}")
    return found[1].replace("int64_t{", "").replace("}", "")


def work() -> str:
    picture = Picture("How the attention of a batch is divided")
    left, width, right = 110, 270, 400
    loop, gemm = "kernels/attention/packed-inl.h", "kernels/engines/gemm-inl.h"
    limits = "include/cpattn/base/limits.h"
    keys = constant(limits, "kMaxBlockKeys")
    chunk = constant(loop, "kMaxChunkKeys")
    group, granule = constant(loop, "kRowGroup"), constant(gemm, "kKeyGranule")
    most = constant("meta/attention/attention_plan.cc", "kMaxItemRows")
    tokens = constant("include/cpattn/attention/attention_plan.h", "kMaxDecodeTokens")
    short = constant(limits, "kInPlaceGranule")

    def strip(
        y: float, height: float, rows: int, columns: int, kind: str, picked: tuple[int, int]
    ) -> tuple[float, float, float, float]:
        """A rectangle cut into rows and columns; returns the place of the picked one."""
        w, h = width / columns, height / rows
        for i in range(rows):
            for j in range(columns):
                chosen = (i, j) == picked
                picture.rect(left + j * w, y + i * h, w, h, "warm" if chosen else kind)
        return left + picked[1] * w, y + picked[0] * h, w, h

    def zoom(place: tuple[float, float, float, float], y: float) -> None:
        x, top, w, h = place
        picture.line((x, top + h), (left, y), dashed=True)
        picture.line((x + w, top + h), (left + width, y), dashed=True)

    def explain(y: float, title: str, words: str, where: str) -> None:
        picture.text(right, y + 13, title, "bold")
        y = picture.paragraph(right, y + 17, WIDTH - right, words)
        picture.paragraph(right, y, WIDTH - right, where, "soft")

    def rows(y: float, *words: str) -> None:
        for i, line in enumerate(words):
            picture.text(left - 10, y + i * LINE, line, anchor="end")

    picture.text(left + width / 2, 20, "keys →", anchor="middle")
    item = strip(30, 96, 4, 1, "cool", (3, 0))
    rows(70, "new tokens", "× heads of", "a KV head")
    explain(
        16, "batch → items",
        f"Rows that share the keys of one sequence and KV head, at most {most}. Sequences of up to "
        f"{tokens} new tokens are cut along their keys too, at multiples of {short} or {keys}.",
        "the plan: meta/attention/attention_plan.cc, attention_split.cc",
    )  # fmt: skip
    zoom(item, 170)
    block = strip(170, 70, 1, 4, "cool", (0, 1))
    rows(205, "one item,", "a tile in", "the kernel")
    explain(
        156, "item → blocks",
        f"Keys and values packed together: {keys}, fewer by a power of two where rows are wide, "
        "so that they stay in half of the L2.",
        "block_keys() in " + loop,
    )  # fmt: skip
    zoom(block, 300)
    cell = strip(300, 96, 4, 4, "cool", (3, 2))
    rows(345, "all rows,", f"by {group}")
    explain(
        288, "block → chunks and groups of rows",
        f"Scores computed at a time: {group} rows × {chunk} keys. Both products and softmax take "
        "them while they are in the L1.",
        "kRowGroup, kMaxChunkKeys in " + loop,
    )  # fmt: skip
    zoom(cell, 460)
    strip(460, 70, 1, 8, "green", (-1, -1))
    rows(498, f"{group} rows")
    for i in range(9):
        x = left + width / 8 * i
        picture.line((x, 530), (x, 536))
    picture.text(left + width / 2, 554, f"{granule} keys each", anchor="middle")
    explain(
        440, "chunk → granules, operands in panels",
        f"Keys are hidden, exponentiated and multiplied by whole granules of {granule}. A panel is "
        "as many columns of a packed operand as one product takes: a few vectors, so each "
        "instruction set has its width.",
        "kKeyGranule, kPanel in " + gemm,
    )  # fmt: skip
    return picture.finish()


# --- AMX ---------------------------------------------------------------------------------------


def pipeline() -> str:
    """Two groups of rows of four steps each, as AmxPacked::attend orders them."""
    picture = Picture("Attention on AMX tiles: scores run two steps ahead of softmax")
    left, w = 96, 66.0
    tiles = ["S 0", "S 1", "S 2", "S 3", "S 4", "S 5", "P V 0–3", "S 6", "S 7"]
    vectors = ["", "", "softmax\n0", "softmax\n1", "softmax\n2", "softmax\n3", "O +=\ncolumns",
               "O +=,\nsoftmax\n4", "softmax\n5"]  # fmt: skip
    picture.text(10, 20, "time →", "soft")
    for i, (product, other) in enumerate(zip(tiles, vectors, strict=True)):
        x = left + i * w
        kind = "warm" if product.startswith("P") else "cool"
        picture.label(x, 34, w - 2, 40, product, kind)
        if other:
            picture.label(x, 80, w - 2, 58, other, "green")
    picture.text(10, 58, "tiles", "bold")
    picture.text(10, 114, "vector units", "bold")
    picture.rect(left + 2 * w, 144, 7 * w - 2, 22, "plain")
    picture.text(left + 2 * w + 8, 160, "the next keys and values are fetched to the L2", "soft")
    picture.text(10, 160, "memory", "bold")
    x, y = left + 4 * w, 216
    picture.line((x, 166), (10, y), dashed=True)
    picture.line((x + w - 2, 166), (690, y), dashed=True)
    picture.text(200, y - 8, "one column, as instructions follow each other", "bold")
    cell = 680 / 8
    for i in range(4):
        picture.label(10 + 2 * i * cell, y, cell - 2, 40, "product\nof tiles", "cool")
        picture.label(10 + (2 * i + 1) * cell, y, cell - 2, 40, "slice of\nsoftmax", "green")
    below = picture.paragraph(
        10, y + 48, WIDTH - 30,
        "A slice is the softmax of 1, 2 or 4 rows. Both units work at once, because neither waits "
        "for what the other is at.",
    )  # fmt: skip
    below = picture.paragraph(
        10, below + 4, WIDTH - 30,
        "S i: scores of queries and keys of step i, 32 rows against 32 keys. Steps 0 to 3 are "
        "one group of rows in one block of keys, 4 to 7 the next: P V 0–3 multiplies all "
        "probabilities of the group with the values, one column tile after the other. While a "
        "column tile is computed, "
        "the one before is added to O.",
    )  # fmt: skip
    top = below + 30
    picture.text(10, top - 8, "the eight tiles:", "bold")
    cell = 680 / 8
    kinds = ["sum"] * 4 + ["left"] * 2 + ["right"] * 2
    colours = {"sum": "warm", "left": "cool", "right": "green"}
    for i, kind in enumerate(kinds):
        picture.label(10 + i * cell, top, cell - 2, 40, f"tile {i}\n{kind}", colours[kind])
    picture.paragraph(
        10, top + 48, WIDTH - 30,
        "Four sums hide the latency of a product. A finished sum is stored right before the next "
        "product that uses its tile, so that nothing waits for the last product.",
    )  # fmt: skip
    return picture.finish()


PICTURES = {
    "floors": floors,
    "rooms": rooms,
    "packages": packages,
    "work": work,
    "amx": pipeline,
}


def main() -> int:
    return write_pictures(IMAGES, PICTURES, script="architecture", purpose=__doc__)


if __name__ == "__main__":
    sys.exit(main())
