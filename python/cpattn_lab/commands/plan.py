# SPDX-License-Identifier: Apache-2.0
"""`cpattn plan`: time, balance and traffic of many ranks, predicted."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from cpattn import torch_guard
from cpattn.context_parallel.exchanges import EXCHANGES
from cpattn_terminal.command_group import CommandGroup, refusals_by_option
from cpattn_terminal.limits import MAX_BATCH_TOKENS
from cpattn_terminal.options import Integer, IntegerList, Number, PoolPlacement

from .declarations import (
    DTYPES,
    HEAD_DIM,
    INPUT,
    MODEL_SIZE,
    OUTPUT,
    REQUESTS,
    SIZE,
    STRATEGIES,
    failures,
    is_given,
    of_model,
    option,
    write_file,
)
from .options import CpSizes, DecodedSequences, KeyWindow, MeshShape

_PLANNED_EXCHANGE = click.Choice((*EXCHANGES, "auto"))
_COST, _RATE = Number(0, 1e9), Number(1e-3, 1e9)

CommandGroup.examples["plan"] = "cpattn plan --cp-size 8..64 --tokens 131072"


def _of_rank(names: str, default: str, text: str, kind: Any = _COST) -> Callable[[Any], Any]:
    """Make the option of a rate of `cpattn_lab.cost_model.Rates`."""
    return click.option(*names.split(), help=text, type=kind, show_default=default)


@click.command(short_help="Predict attention over many ranks: time, balance, traffic.")
@option("--cp-size", "8..1024", "Number of ranks; a range doubles up to its end.", CpSizes())
@option("--strategy", "all", "Way of cutting sequences.", click.Choice((*STRATEGIES, "all")))
@of_model(
    "--placement",
    "replicated; --decode: page_interleave",
    "Placement of keys on ranks.",
    PoolPlacement(),
)
@of_model(
    "--exchange",
    "gather; --decode: all_to_all",
    "Rows that ranks send; auto: the fewest bytes.",
    _PLANNED_EXCHANGE,
)
@click.option(
    "--mesh",
    type=MeshShape(),
    help="Shape of the ranks for usp: a ring of rows, each of which shares out heads.",
)
@of_model(
    "--overlap",
    "none",
    "Exchange during attention; ahead: cached keys of the next layer, too.",
    click.Choice(("none", "full", "ahead")),
)
@of_model(
    "--state-dtype",
    "float32",
    "Data type of partial results that ranks send.",
    click.Choice(DTYPES[1:]),
)
@click.option("--hosts", type=CpSizes(), help="Number of hosts; replaces --cp-size.")
@of_model("--ranks-per-host", "1", "Ranks on each host; they share memory.", MODEL_SIZE)
@click.option("--cpus", type=MODEL_SIZE, help="CPUs of a host [default: one for each thread].")
@click.option(
    "--decode",
    type=DecodedSequences(),
    metavar="[N|recorded]",
    help="Predict one decode step of this many sequences, or the largest of --capture.",
)
@of_model(
    "--out-heads", "own", "Heads that a rank has after a decode step.", click.Choice(("own", "all"))
)
@of_model("--tokens", "32768", "New tokens of one sequence.", Integer(1, MAX_BATCH_TOKENS))
@of_model("--prefix", "0", "Cached tokens before the new ones.", Integer(0))
@click.option(
    "--extend-lens", type=IntegerList(), help="New tokens of each sequence; replaces --tokens."
)
@click.option(
    "--prefix-lens", type=IntegerList(), help="Cached tokens of each sequence [default: 0]."
)
@click.option("--trace", type=INPUT, help="Batches of a Mooncake trace, .jsonl or .gz.")
@of_model("--requests num_requests", "64", "Requests taken from the start of the trace.", REQUESTS)
@of_model("--token-budget", "32768", "New tokens in a batch of the trace.")
@click.option("--capture", "captures", multiple=True, type=INPUT, help="Batches of a recorded run.")
@option("--heads num_heads", 32, "Query heads.", MODEL_SIZE)
@option("--kv-heads num_kv_heads", 8, "Key/value heads.", MODEL_SIZE)
@option("--head-dim", 128, "Width of a head.", HEAD_DIM)
@of_model("--v-head-dim", "as --head-dim", "Width of a head of values.", HEAD_DIM)
@option("--dtype", "bfloat16", "Data type of queries, keys and values.", click.Choice(DTYPES[1:]))
@option("--layers num_layers", 32, "Layers of the model.", MODEL_SIZE)
@option("--page-size", 128, "Tokens in a page.", SIZE)
@click.option(
    "--window",
    type=KeyWindow(),
    help="Keys that a token sees before its own, or before and behind it; all: no bound.",
)
@click.option("--latent", is_flag=True, help="Values are the start of keys, as in absorbed MLA.")
@click.option(
    "--bias",
    type=click.Choice(("alibi", *DTYPES[1:])),
    help="Term added to scores: distances, or numbers for each head; --calibrate times it.",
)
@click.option("--calibrate", is_flag=True, help="Measure the rates here, in a few seconds.")
@_of_rank(
    "--threads --threads-per-rank", "32; measured: all CPUs", "Threads of a rank.", MODEL_SIZE
)
@_of_rank(
    "--gflops", "by dtype, see above", "Products of attention by all threads of a rank.", _RATE
)
@_of_rank("--pack-rows", "24", "Cost of packing a key, in rows of products with it.")
@_of_rank("--row-keys", "75", "Cost of a row beside its products, in keys.")
@_of_rank("--call-us", "6", "Overhead of a call of attention, in microseconds.")
@_of_rank("--lse-share", "0", "Cost of LSEs, as a share of the products.")
@_of_rank(
    "--merge-ns", "2.7", "Time of a thread to merge an element of a partial result, in nanoseconds."
)
@_of_rank("--gather-gb-per-s", "1.25", "GB/s into a rank or host, and out of it.", _RATE)
@_of_rank("--latency-us", "200", "Latency of an exchange, in microseconds; a gather is two.")
@_of_rank("--message-us", "20", "Time of a message to a peer, in microseconds.")
@_of_rank(
    "--store-gb-per-s", "4 a thread, up to 40", "GB/s of received keys and values to a pool.", _RATE
)
@_of_rank("--exchange-cpu-gb-per-s", "2.5", "GB/s that a CPU sends and receives.", _RATE)
@_of_rank("--read-rows", "24", "Cost of reading a key in a decode step, in rows of products.")
@click.option(
    "--json", "json_path", type=OUTPUT, help="Write the prediction of every rank to this file."
)
def plan(json_path: Path | None, captures: tuple[Path, ...], **options: Any) -> None:
    """Predict the time, balance and traffic of attention over many ranks.

    Work and bytes are exact: every rank's query-key pairs, and what it sends for keys and values
    in a layer. Times follow from rates of one rank and its network: given, measured here with
    --calibrate, or else assumed. Assumed rates are of ranks of 32 threads of an AMD EPYC with
    AVX512_BF16, each 440 GFLOP/s in bfloat16 (230 in float16 and float32), and of gloo over
    10 Gbit/s, whatever this machine is. The last lines say which, as options to give another time.

    Ranks gather the new keys and values into pools that all have everything, one thing after
    another, unless told otherwise. With --placement page_interleave or token_interleave each
    pool keeps every N-th page or token (token_interleave:I: run of I tokens), and cached keys
    move, too. --exchange ring passes them on step by step, pass_q sends queries to the keys and
    outputs back, all_to_all cuts by heads, usp cuts by heads in rows of a --mesh and passes keys
    from row to row, auto is what ContextParallel takes: the fewest bytes. --overlap full hides what
    it can behind attention, ahead also gathers the cached keys of the next layer meanwhile. Ranks
    of a host share its memory and its wire, of which --gather-gb-per-s is the rate then. --decode
    predicts a step over shared pools: outputs and LSE go to the ranks of their heads, or by
    --exchange gather to all ranks; with --out-heads all every rank has all heads in the end.

    \b
    A prompt of 128 Ki tokens over 8, 16, ... 1024 ranks, with assumed rates:
      cpattn plan --cp-size 8..1024 --tokens 131072
    A batch with cached prefixes, rates of this machine, a network of 100 Gbit/s:
      cpattn plan --cp-size 4,8,12 --extend-lens 4096,700,9000 \\
          --prefix-lens 0,8192,512 --calibrate --gather-gb-per-s 12.5
    The batches of a trace, with known rates:
      cpattn plan --trace trace.jsonl --cp-size 8 --threads 32 --gflops 9000
    A long prefix in pools that are shared out, over hosts of four ranks each:
      cpattn plan --hosts 2..16 --ranks-per-host 4 --tokens 4096 --prefix 524288 \\
          --placement page_interleave --exchange auto --overlap full
    Eight ranks: pairs share out the heads, and four pairs pass the keys on:
      cpattn plan --exchange usp --mesh 4x2 --prefix 524288 \\
          --placement page_interleave
    Decoding 64 such sequences:
      cpattn plan --cp-size 8..64 --decode 64 --prefix 524288
    The largest decode step that ranks recorded, over others:
      cpattn plan --capture run.cpcap --decode recorded --placement token_interleave:16
    """
    if options["hosts"] and is_given("cp_size"):
        raise click.UsageError("ranks are --cp-size, or --hosts times --ranks-per-host, not both")
    if options["mesh"] and (options["hosts"] or is_given("cp_size")):
        raise click.UsageError("ranks are those of --mesh, without --cp-size and --hosts")
    if options["decode"] and is_given("strategy"):
        raise click.UsageError("--strategy cuts new tokens of a prefill; --decode has none to cut")
    recorded = options["decode"] == "recorded"
    if recorded and (not captures or is_given("prefix") or is_given("prefix_lens")):
        raise click.UsageError("--decode recorded takes lengths of a --capture, not of --prefix")
    importlib.import_module("rich")  # if it is missing, the error comes before any measurement
    from cpattn_terminal.progress import make_progress

    from ..cost_model.command import forecasts
    from ..cost_model.report import print_plan, write_json

    message = torch_guard.prepare() if options["calibrate"] else None
    if message:
        click.echo(message, err=True)
    if captures:
        from cpattn_proof.commands.of_captures import largest_step, recorded_batches

        if recorded:
            options["prefix_lens"] = largest_step(captures)
            options["decode"] = len(options["prefix_lens"])
        else:
            options["recorded"] = recorded_batches(captures)
    with (
        make_progress("cpattn plan", "steps") as progress,
        refusals_by_option(),
        failures(),
    ):
        predictions, rates, sources = forecasts(progress=progress, **options)
    print_plan(predictions, rates, sources)
    if json_path:
        write_file("JSON", json_path, lambda: write_json(json_path, predictions, rates, sources))
