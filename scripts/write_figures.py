# SPDX-License-Identifier: Apache-2.0
"""Writes bench/results into the pages of docs/figures and the README, between two markers.

Each page has the cases of its subject in narrow tables, with machine and date, and the bars that
were missed with the reason, which bench/results/missed.toml must have. The README has few of them.
The files in bench/results hold everything.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import engine_tables  # noqa: E402 (not on the path before)
import exchange_tables  # noqa: E402
import figure_tables  # noqa: E402
import model_tables  # noqa: E402
from case_tables import (  # noqa: E402
    DOUBTFUL,
    Figure,
    compared,
    figures_of,
    missed,
    name_of,
    reason,
    untimed,
)
from figure_tables import table  # noqa: E402

from bench.harness.figures import Row, duration, findings, of_cpattn  # noqa: E402

RESULTS, PAGES, README = ROOT / "bench" / "results", ROOT / "docs" / "figures", ROOT / "README.md"
BEGIN, END = "<!-- figures: scripts/write_figures.py -->\n", "<!-- end of figures -->\n"


def read(name: str) -> list[Row]:
    lines = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def machine(row: Row) -> str:
    return (
        f"{row['machine']}, {row['num_threads']} threads, `{row['isa']}`, torch {row['torch']}, "
        f"{row['compiler']}, {row['date']}."
    )


def plot(name: str, text: str) -> str:
    return f"![{text}](../../bench/results/{name}.png)"


def on_both(name: str, tables: Callable[[list[Row]], Iterator[str]]) -> Iterator[str]:
    """The tables of two machines, without and with AMX."""
    for file in (name, f"{name}-amx"):
        rows = read(file)
        yield f"## {rows[0]['machine']}, `{rows[0]['isa']}`"
        yield f"Measured on: {machine(rows[0])}"
        yield from (f"#{text}" if text.startswith("#") else text for text in tables(rows))


def parts(name: str, titles: dict[str, str]) -> Iterator[str]:
    """A benchmark whose rows have parts, a table for each."""
    rows = read(name)
    yield f"Measured on: {machine(rows[0])}"
    yield from tables_of_parts(rows, titles)


def tables_of_parts(rows: list[Row], titles: dict[str, str]) -> Iterator[str]:
    for part, title in titles.items():
        of_part = [row for row in rows if row["part"] == part]
        for text in compared(of_part, title):
            yield text
            if text.startswith("#"):
                yield from measured_elsewhere(of_part, rows)
    yield from missed(rows)


def measured_elsewhere(of_part: list[Row], rows: list[Row]) -> Iterator[str]:
    """The machine of a part, where it is not that of the first rows."""
    if (where := machine(of_part[0])) != machine(rows[0]):
        yield f"Measured on: {where}"


def is_decode(row: Row) -> bool:
    return "decode" in row["case"]["workload"]


def attention(wanted: Callable[[Row], bool]) -> Iterator[str]:
    def tables(rows: list[Row]) -> Iterator[str]:
        rows = [row for row in rows if wanted(row)]
        yield from compared(rows)
        yield from missed(rows)

    return on_both("attention", tables)


def decode() -> Iterator[str]:
    yield from attention(is_decode)
    for name in ("attention", "attention-amx"):
        rows = of_cpattn(read(name))
        yield f"What changes the time on {rows[0]['machine']}, `{rows[0]['isa']}`:"
        yield "\n".join(f"- {line}" for line in said_of(rows) if line.startswith("decode"))


def said_of(rows: list[Row]) -> Iterator[str]:
    """Findings, and why the bar of the ranks is missed: their samples differ by more."""
    apart = max(row["spread"] / row["median"] for row in rows if row["shape"]["cp"])
    for line in findings(rows):
        missed = line.startswith("ranks") and "MISSED" in line
        because = f"; the samples of one rank are up to {100 * apart:.1f} % apart"
        yield line.replace("MISSED", "missed") + because * missed


def prefill() -> Iterator[str]:
    yield from attention(lambda row: not is_decode(row))
    yield "## What changes the time"
    for name in ("attention", "attention-amx"):
        rows = of_cpattn(read(name))
        yield f"{rows[0]['machine']}, `{rows[0]['isa']}`:"
        yield "\n".join(f"- {line}" for line in said_of(rows) if "decode" not in line)
    yield "## Plots"
    yield plot("length", "percent of the peak over the length of a sequence")
    yield plot("batch", "percent of the peak over the batch size")
    yield plot("roofline", "roofline")
    yield plot("speedup", "time of each engine in units of cpattn's")


def sparse() -> Iterator[str]:
    titles = {"indexer": "Indexer", "top-k": "Top-k", "sparse MLA": "Sparse MLA"}
    yield from parts("sparse", titles | {"rows": "Rows", "metadata": "Metadata"})
    yield "## Memory and recall of the indexer"
    yield from untimed([row for row in read("sparse") if row["part"] in ("memory", "recall")])
    yield plot("sparse", "sparse attention: indexer, top-k, MLA")


def transfer() -> Iterator[str]:
    titles = {"planning": "Plans", "scatter": "Writes into a pool", "local": "Copies between pools"}
    yield from parts("transfer", titles | {"engine": "Sent to another process"})
    yield plot("transfer", "KV transfer: bytes over the engine by runs, and time of plans")


def transformers() -> Iterator[str]:
    titles = {"prefill": "Prefill", "paged": "Continuous batching", "latents": "MLA and DSA"}
    return parts("transformers", titles | {"hub_kernel": "Functions of the folder for kernels"})


def metadata() -> Iterator[str]:
    for name, title in (("sglang", "Inside sglang"), ("metadata", "Against loops in Python")):
        rows = read(name)
        yield f"## {title}"
        yield f"Measured on: {machine(rows[0])}"
        yield from compared(rows)
        yield from missed(rows)


def extends() -> Iterator[str]:
    def tables(rows: list[Row]) -> Iterator[str]:
        grid, same = ([r for r in rows if r["part"] == p] for p in ("extends", "batch_invariant"))
        yield from figure_tables.extends(grid, lambda r: reason(Figure(r["case"], "", r, None)))
        yield from compared(same, "The same bits in any batch")
        yield from missed(same)

    yield from on_both("extends", tables)
    yield "## Plot"
    yield plot("extends", "percent of the roofline over new tokens, behind 8,192 cached")


def kv_dtypes() -> Iterator[str]:
    def tables(rows: list[Row]) -> Iterator[str]:
        yield from tables_of_parts(rows, {"decode": "Decode", "prefill": "Prefill"})
        yield from figure_tables.all_bars(rows)

    return on_both("kv_dtypes", tables)


def exchanges() -> Iterator[str]:
    return on_both("exchanges", exchange_tables.exchanges)


def models() -> Iterator[str]:
    rows = read("models")
    yield f"Measured on: {machine(rows[0])}"
    yield from model_tables.models(rows)


def engine(name: str, own: str) -> Iterator[str]:
    """A serving engine with its own attention and with cpattn's."""
    rows = read(name)
    yield f"Measured on: {machine(rows[0])}"
    parts = ("steps", "MLA", "encoders", "trace")
    of = {part: [row for row in rows if row["part"] == part] for part in parts}
    yield "## Steps"
    yield engine_tables.steps(of["steps"], own)
    if of["MLA"]:
        yield "## Steps of MLA"
        yield engine_tables.steps(of["MLA"], own)
    if of["encoders"]:
        yield "## Encoders"
        yield from measured_elsewhere(of["encoders"], rows)
        yield engine_tables.steps(of["encoders"], own)
    yield from missed(rows)
    yield "## A trace"
    yield from engine_tables.served(of["trace"], own)


#: What the README shows: file, case and form, and the words for it.
HEADLINES = (
    ("attention", r"^2048 new behind 8192", "Attention, 2,048 new tokens behind 8,192 cached"),
    ("attention", r"^decode 16 × 1, KV 8192", "Attention, decode of 16 sequences of 8,192"),
    ("attention", r"zigzag over 8, rank 7", "One of 8 zigzag ranks, 32 Ki tokens"),
    ("sglang", r"zigzag, batch 256", "Context-parallel metadata, 256 sequences"),
    ("vllm", r"^prefill of 4096", "vLLM's engine, a prompt of 4,096"),
    ("sglang_engine", r"^prefill of 2048", "sglang's engine, a prompt of 2,048"),
    ("sglang_engine", r"^decode 8 behind 1024", "sglang's engine, decode of 8 sequences of 1,024"),
    ("sparse", r"^indexer.*KV 65,536, bf16", "DSA indexer, 512 tokens on 65,536 keys"),
    ("sparse", r"^sparse MLA.*128, bf16", "Sparse MLA, 2,048 keys, 128 heads"),
    ("transfer", r"^write K and V, bfloat16 to bfloat16.*8$", "32,768 tokens written into pages"),
    (
        "transformers",
        r"^prefill, tokens 8,192, cached 0",
        "transformers, 0.5 B random weights, 8,192 tokens",
    ),
)


def headlines() -> Iterator[str]:
    lines, dates, rows_on = [], [], dict[str, list[int]]()
    for name, pattern, words in HEADLINES:
        found = [f for f in figures_of(read(name)) if re.search(pattern, f.label({}))]
        figure = found[0]
        assert figure.peer is not None
        ratio = figure.peer["median"] / figure.row["median"]
        time = figure.doubtful * DOUBTFUL + duration(figure.row["median"])
        peer = f"{name_of(figure.peer).split()[0]}, {duration(figure.peer['median'])}"
        lines.append([words, time, peer, f"{ratio:.2g} ×" if ratio < 10 else f"{ratio:.0f} ×"])
        dates.append(figure.row["date"])
        rows_on.setdefault(figure.row["machine"], []).append(len(lines))
    row = read("attention")[0]
    machines = " and ".join(
        f"{name} (rows {rows[0]} to {rows[-1]})" if len(rows_on) > 1 else name
        for name, rows in rows_on.items()
    )
    yield table([["what", "cpattn", "best named peer", "ratio"], *lines], 3)
    yield (
        f"{machines},\n{row['num_threads']} threads, `{row['isa']}`, bfloat16, {min(dates)} to "
        f"{max(dates)}; medians, `{DOUBTFUL}` where one sample at most was undisturbed."
    )


WRITERS: dict[Path, Callable[[], Iterator[str]]] = {
    README: headlines,
    PAGES / "attention.md": prefill,
    PAGES / "decode.md": decode,
    PAGES / "metadata.md": metadata,
    PAGES / "sparse.md": sparse,
    PAGES / "transfer.md": transfer,
    PAGES / "transformers.md": transformers,
}
#: Pages whose benchmark has results only once it was run on an idle machine.
WRITERS |= {
    PAGES / f"{name}.md": writer
    for name, writer in (
        ("extends", extends),
        ("kv_dtypes", kv_dtypes),
        ("exchanges", exchanges),
        ("models", models),
        ("sglang_engine", partial(engine, "sglang_engine", "torch_native")),
        ("vllm", partial(engine, "vllm", "vLLM's own")),
    )
    if (RESULTS / f"{name}.jsonl").exists()
}


def with_figures(path: Path) -> str:
    """The text of a document, with figures of today."""
    text = path.read_text(encoding="utf-8")
    if BEGIN not in text:
        sys.exit(
            f"{path.relative_to(ROOT)}: its figures are by hand; put {BEGIN!r} where results go"
        )
    figures = "\n\n".join(WRITERS[path]())
    pattern = re.escape(BEGIN) + ".*?" + re.escape(END)
    written = f"{BEGIN}\n{figures}\n\n{END}"
    return re.sub(pattern, lambda _: written, text, flags=re.DOTALL)


if __name__ == "__main__":
    for path in WRITERS:
        if sys.argv[1:] != ["--check"]:
            path.write_text(with_figures(path), encoding="utf-8")
        elif with_figures(path) != path.read_text(encoding="utf-8"):
            sys.exit(f"{path.relative_to(ROOT)} is older than bench/results: {sys.argv[0]}")
