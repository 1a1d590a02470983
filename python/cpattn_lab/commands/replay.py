# SPDX-License-Identifier: Apache-2.0
"""`cpattn replay`: serving traffic over several processes, checked."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import click

from cpattn import torch_guard
from cpattn.context_parallel.exchanges import ON_ALL_RANKS
from cpattn_terminal import streams
from cpattn_terminal.command_group import CommandGroup, refusals_by_option
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
    of_model,
    option,
    write_file,
)

_HEADS = Integer(1, 1024)
_STRATEGY = click.Choice(STRATEGIES)
_MODEL = click.Choice(("dense", "dsa"))
_KV_DTYPE = click.Choice(("auto", "bf16", "fp8", "fp8_e5m2", "int8"))
_EXCHANGE = click.Choice((*ON_ALL_RANKS, "auto"))
_IMPL = click.Choice(("flashmla_kv", "flashmla_sparse"))

CommandGroup.examples["replay"] = "cpattn replay --requests 16 --html report.html"


@click.command(short_help="Replay serving traffic over several processes, and check it.")
@click.option(
    "--trace", type=INPUT, help="Mooncake trace, .jsonl or .jsonl.gz [default: generated]."
)
@click.option(
    "--capture",
    "captures",
    multiple=True,
    type=INPUT,
    help="Make the plans of a recorded run again, instead of a replay.",
)
@option("--requests num_requests", 64, "Requests taken from the start of the trace.", REQUESTS)
@option("--scale-lengths", 8, "Divisor of all lengths and of blocks; it divides 512.", SIZE)
@option("--seed", 1, "Seed of generated traffic, tokens and weights.", Integer(0, 2**64 - 1))
@option("--cp-size", 2, "Processes of a pipeline stage, which share out its tokens.", SIZE)
@option("--pp-size", 1, "Pipeline stages, which share out the layers and take turns.", SIZE)
@option("--strategy", "zigzag", "Way of cutting sequences.", _STRATEGY)
@click.option(
    "--weights", type=IntegerList(1 << 16), help="Speeds of ranks, such as 4,1 [default: equal]."
)
@click.option(
    "--placement",
    default="replicated",
    type=PoolPlacement(),
    help="Placement of keys on the KV pools of ranks.",
    show_default=True,
)
@option("--exchange", "auto", "Rows that ranks send to attend to keys of other ranks.", _EXCHANGE)
@click.option("--against-replicated", is_flag=True, help="Replay over replicated pools, too.")
@option("--hosts", 1, "Network namespaces that ranks are divided among (root).", Integer(1, 64))
@click.option("--link-gbps", type=Number(1e-3, 1e3), help="Rate of a host's link, Gbit/s.")
@option("--token-budget", 4096, "New tokens in a batch; longer prompts are cut.", SIZE)
@option("--max-sequences", 64, "Sequences in a batch.", MODEL_SIZE)
@option("--page-size", 32, "Tokens in a page; divides 512 / scale-lengths.", SIZE)
@option("--pool-tokens", 24576, "Tokens that the KV pool holds, in whole pages.", SIZE)
@option("--model", "dense", "Dense attention, or sparse attention as in DeepSeek-V3.2.", _MODEL)
@of_model("--layers num_layers", "4; dsa: 1", "Decoder layers; dsa has one.", Integer(1, 1024))
@of_model("--hidden-size", "512", "Width of the decoder.", MODEL_SIZE)
@of_model("--heads num_heads", "8; dsa: 16", "Query heads.", _HEADS)
@of_model("--kv-heads num_kv_heads", "2", "dense: key/value heads.", _HEADS)
@of_model("--head-dim", "64", "dense: width of a head.", HEAD_DIM)
@of_model("--intermediate-size", "1536", "Width of the MLP.", MODEL_SIZE)
@of_model("--index-heads", "16", "dsa: heads of the indexer.", _HEADS)
@of_model("--topk", "512", "dsa: keys that the indexer chooses for a query.", MODEL_SIZE)
@of_model("--q-lora-rank", "512", "dsa: width of the latent of queries.", MODEL_SIZE)
@of_model("--kv-dtype", "auto", "Data type of the KV pool; auto and bf16 take --dtype.", _KV_DTYPE)
@of_model(
    "--prefill-impl",
    "flashmla_kv",
    "dsa: kernel of prompts; flashmla_sparse expands FP8 rows first.",
    _IMPL,
)
@click.option("--disaggregate", is_flag=True, help="Decode in another process.")
@of_model(
    "--decode-tokens",
    "8",
    "Tokens to decode for each request, at most its output_length.",
    MODEL_SIZE,
)
@of_model("--decode-ranks", "1", "Processes that decode; each has a share of the pages.")
@option(
    "--dtype",
    "auto",
    "Data type; auto takes bfloat16 if the CPU multiplies it.",
    click.Choice(DTYPES),
)
@option("--threads num_threads", 0, "Threads of a process; 0 divides the cores.", Integer(0))
@option("--check/--no-check", True, "Compare with one process without cache.")
@of_model("--check-rows", "16", "Rows of each sequence in a batch that are compared.")
@option("--torch-baseline/--no-torch-baseline", True, "Time torch on the same batches.")
@click.option("--json", "json_path", type=OUTPUT, help="Write everything measured to this file.")
@click.option("--html", "html_path", type=OUTPUT, help="Write a report with plots to this file.")
@click.option(
    "--guide/--no-guide",
    default=None,
    help="Say at the end what was seen and what to try next.",
    show_default="on a terminal",
)
def replay(
    trace: Path | None,
    captures: tuple[Path, ...],
    json_path: Path | None,
    html_path: Path | None,
    guide: bool | None,
    against_replicated: bool,
    **options: Any,
) -> None:
    """Replay serving traffic through context-parallel prefill.

    Reads requests (JSON lines with timestamp, input_length, output_length and hash_ids, one hash
    per 512 tokens), keeps a paged KV pool with a prefix cache over the hashed blocks, forms
    prefill batches under a token budget, and runs each over PP_SIZE x CP_SIZE processes through a
    small decoder with random weights. Prompts follow each other as fast as they are computed.

    With --disaggregate, PP_SIZE x CP_SIZE processes prefill, and send the KV pages of each batch
    over the Mooncake transfer engine to one more process, which decodes its prompts while the
    next batch is computed. The tokens must be those of one process. Otherwise nothing is decoded.
    DECODE_RANKS processes share out the pages of the decode pool.

    With --placement each rank's pool holds a share of the keys, pages in turn or tokens in turn,
    and --exchange says how queries meet the keys of other ranks; replicated pools gather the new
    keys. --hosts divides the ranks among network namespaces, which takes root, joined by links of
    LINK_GBPS. --against-replicated replays the same traffic with replicated pools afterwards, and
    compares time, memory, bytes and rows.

    With --model dsa the decoder is one layer of sparse attention: an indexer scores all keys of a
    query by a small product of its own, and latent attention (MLA) reads the TOPK best ones. The
    check compares the choice with scores in float64, and attention with dense attention to the
    same keys. With --disaggregate latents, rotary parts and keys of the indexer are sent. Shares of
    the keys are for bf16 caches whose pages are not sent.

    Every prompt is computed again by one process, whole and in float32, and compared. Exit code
    1 if a row or a token differs by more than roundings explain, or if a process dies; 130 after
    Ctrl-C.

    \b
    About 20 seconds on two idle cores:
      cpattn replay --html report.html
    A real trace at a quarter of its lengths, over four processes:
      cpattn replay --trace conversation_trace.jsonl --requests 100 \\
          --scale-lengths 4 --page-size 128 --pool-tokens 131072 --cp-size 4
    Prefill in two pipeline stages, decoding in a third process:
      cpattn replay --disaggregate --pp-size 2 --cp-size 1 --requests 32
    Two hosts of two ranks with 500 Mbit/s between them, a quarter of the keys on each rank:
      cpattn replay --requests 24 --cp-size 4 --hosts 2 --link-gbps 0.5 --kv-heads 8 \\
          --placement page_interleave --against-replicated --no-torch-baseline
    What an engine planned under cpattn.captures.capture, planned again and compared:
      cpattn replay --capture run.cpcap
    Sparse attention over an FP8 cache, with the heads and the top-k of DeepSeek-V3.2:
      cpattn replay --model dsa --kv-dtype fp8 --requests 8 --heads 128 --index-heads 64 \\
          --topk 2048 --q-lora-rank 1536 --no-torch-baseline
    """
    for name in ("rich", "jinja2", "matplotlib") if html_path else ("rich",):
        importlib.import_module(name)  # a missing package is an error now, not after the run
    if json_path and html_path and json_path.absolute() == html_path.absolute():
        raise click.UsageError(f"--json and --html must be two files, both are {json_path}")
    if captures:
        from cpattn_proof.commands.of_captures import replay_captures

        replay_captures(captures, json_path)
    message = torch_guard.prepare()
    from cpattn_terminal.progress import make_progress

    from ..replay.command import check_room, check_sharded, read_requests, settings_of
    from ..replay.comparison import SampledRows, compared, replicated
    from ..replay.driver import replay as run
    from ..replay.report.guide import guide_lines
    from ..replay.report.summary import print_report, write_json

    with refusals_by_option():
        requests = read_requests(trace, options.pop("num_requests"), options["seed"])
        settings = settings_of(**options)
        asked = [settings]
        if against_replicated:
            check_sharded(settings)
            asked.insert(0, replicated(settings))  # its pools take more memory
        warnings = [check_room(requests, each) for each in asked]
    for line in filter(None, (message, warnings[0] or warnings[-1])):
        click.echo(line, err=True)
    with failures(), make_progress("cpattn replay", "prompt tokens") as progress:
        rows = SampledRows() if against_replicated else None
        report = run(requests, settings, progress=progress, sampled=rows)
    if rows is not None:
        other_rows = SampledRows()
        with (
            failures(),
            make_progress("cpattn replay, replicated", "prompt tokens") as progress,
        ):
            other = run(
                requests, replicated(settings), progress=progress, sampled=other_rows, oracle=False
            )
        report.replicated = compared(rows, other, other_rows)
    title = trace.name if trace else "generated traffic"
    print_report(report, title)
    if json_path:
        write_file("JSON", json_path, lambda: write_json(report, json_path))
    if html_path:
        from ..replay.report.html import write_html

        write_file("report", html_path, lambda: write_html(report, title, html_path))
    if guide or (guide is None and streams.is_terminal()):
        lines = guide_lines(report, streams.width(), has_page=html_path is not None)
        click.echo("\n" + "\n".join(lines))
    if not report.passed:
        click.get_current_context().exit(1)
