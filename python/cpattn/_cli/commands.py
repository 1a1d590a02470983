# SPDX-License-Identifier: Apache-2.0
"""The commands of `cpattn`, with click. What they need beyond it is imported when they run."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from .. import torch_guard
from .._core import __version__
from .._limits import MAX_BATCH_TOKENS, MAX_RANKS, check_batch
from . import streams
from .command_group import CommandGroup, refusals_by_option
from .options import CpSizes, Integer, IntegerList, Number, OutputPath

STRATEGIES = ("zigzag", "interleave", "contiguous")
DTYPES = ("auto", "float32", "bfloat16", "float16")

_SIZE = Integer()
_MODEL_SIZE = Integer(1, 1 << 16)
_HEADS, _HEAD_DIM = Integer(1, 1024), Integer(16, 576)
_REQUESTS = Integer(1, 1_000_000)
_STRATEGY = click.Choice(STRATEGIES)
_MODEL = click.Choice(("dense", "dsa"))
_KV_DTYPE = click.Choice(("auto", "bf16", "fp8", "fp8_e5m2", "int8"))
_PLACEMENT = click.Choice(("replicated", "page_interleave", "token_interleave"))
_EXCHANGE = click.Choice(("gather", "ring", "pass_q", "all_to_all", "auto"))
_IMPL = click.Choice(("flashmla_kv", "flashmla_sparse"))
_INPUT = click.Path(exists=True, dir_okay=False, path_type=Path)
_OUTPUT = OutputPath()
_COST, _RATE = Number(0, 1e9), Number(1e-3, 1e9)


_DOCUMENTS = """\b
cpattn COMMAND --help has all options, and more examples.
Between machines:
  torchrun --nproc-per-node 2 -m cpattn.distributed.check

Documents, in the folder of the sources: docs/index.md, docs/tutorials, docs/command_line.md.
In Python: help(cpattn)."""


def _option(names: str, default: Any, text: str, kind: Any = None) -> Callable[[Any], Any]:
    """An option whose help shows its default; `names` are separated by blanks."""
    return click.option(*names.split(), default=default, help=text, type=kind, show_default=True)


def _of_model(names: str, default: str, text: str, kind: Any = _SIZE) -> Callable[[Any], Any]:
    """An option that each kind of model has a default of its own for, or does not have."""
    return click.option(*names.split(), help=text, type=kind, show_default=default)


def _of_rank(names: str, default: str, text: str, kind: Any = _COST) -> Callable[[Any], Any]:
    """A rate of `cpattn.cost_model.Rates`."""
    return click.option(*names.split(), help=text, type=kind, show_default=default)


def _is_given(name: str) -> bool:
    """Whether the command was given an option that has a default."""
    source = click.get_current_context().get_parameter_source(name)
    return source is not ParameterSource.DEFAULT


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    invoke_without_command=True,
    epilog=_DOCUMENTS,
)
@click.version_option(__version__)
@click.pass_context
def commands(ctx: click.Context) -> None:
    """Context-parallel attention for LLM serving on CPU: the new tokens of a batch are shared out
    to ranks, each of which attends from its own to the keys and values of all.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


CommandGroup.examples = {
    "explain": "cpattn explain --lens 13,40 --prefix 0,64 --cp-size 4",
    "plan": "cpattn plan --cp-size 8..64 --tokens 131072",
    "replay": "cpattn replay --requests 16 --html report.html",
    "doctor": "cpattn doctor",
}


@commands.command(short_help="Draw which rank computes which tokens.")
@click.option("--lens", type=IntegerList(), required=True, help="New tokens of each sequence.")
@click.option("--prefix", type=IntegerList(), help="Cached tokens of each sequence [default: 0].")
@_option("--cp-size", 2, "Number of ranks.", Integer(1, MAX_RANKS))
@_option("--strategy", "zigzag", "How sequences are cut.", _STRATEGY)
def explain(lens: list[int], prefix: list[int] | None, cp_size: int, strategy: str) -> None:
    """Print the block map of a plan: which rank computes which tokens, and what they see.

    \b
    Two sequences, the second behind 64 cached tokens, over four ranks:
      cpattn explain --lens 13,40 --prefix 0,64 --cp-size 4
    """
    from ..context_parallel.explain import MIN_WIDTH, block_map

    prefix = [0] * len(lens) if prefix is None else prefix
    width = max(streams.width() or streams.DEFAULT_WIDTH, MIN_WIDTH)
    with refusals_by_option(extend_lens="--lens", seq_lens="--prefix"):
        check_batch("--lens", lens, "--prefix", prefix)
        seq_lens = [cached + new for cached, new in zip(prefix, lens, strict=True)]
        text = block_map(lens, seq_lens, cp_size=cp_size, strategy=strategy, width=width)
    click.echo(text)


@commands.command(short_help="Predict attention over many ranks: time, balance, traffic.")
@_option("--cp-size", "8..1024", "Ranks; a range doubles up to its end.", CpSizes())
@_option("--strategy", "all", "How sequences are cut.", click.Choice((*STRATEGIES, "all")))
@_of_model(
    "--placement", "replicated; --decode: page_interleave", "Who keeps which keys.", _PLACEMENT
)
@_of_model("--exchange", "gather", "What ranks send; auto: what takes least.", _EXCHANGE)
@_of_model(
    "--overlap", "none", "Exchange and store while attending.", click.Choice(("none", "full"))
)
@_of_model("--state-dtype", "float32", "Of outputs sent to be merged.", click.Choice(DTYPES[1:]))
@click.option("--hosts", type=CpSizes(), help="Hosts, as --cp-size, which is then left out;")
@_of_model("--ranks-per-host", "1", "each with so many ranks, in shared memory.", _MODEL_SIZE)
@click.option("--cpus", type=_MODEL_SIZE, help="CPUs of a host [default: one for each thread].")
@click.option("--decode", type=_MODEL_SIZE, help="Or a step of so many sequences.")
@_of_model("--tokens", "32768", "New tokens of one sequence.", Integer(1, MAX_BATCH_TOKENS))
@_of_model("--prefix", "0", "Cached tokens before them.", Integer(0))
@click.option("--extend-lens", type=IntegerList(), help="Or new tokens of each sequence,")
@click.option("--prefix-lens", type=IntegerList(), help="and cached before them [default: 0].")
@click.option("--trace", type=_INPUT, help="Or the batches of a Mooncake trace, .jsonl or .gz,")
@_of_model("--requests num_requests", "64", "of so many requests from its start,", _REQUESTS)
@_of_model("--token-budget", "32768", "with so many new tokens in a batch.")
@_option("--heads num_heads", 32, "Query heads.", _MODEL_SIZE)
@_option("--kv-heads num_kv_heads", 8, "Key/value heads.", _MODEL_SIZE)
@_option("--head-dim", 128, "Width of a head.", _HEAD_DIM)
@_of_model("--v-head-dim", "as --head-dim", "Width of a head of values.", _HEAD_DIM)
@_option("--dtype", "bfloat16", "Of queries, keys and values.", click.Choice(DTYPES[1:]))
@_option("--layers num_layers", 32, "Layers of the model.", _MODEL_SIZE)
@_option("--page-size", 128, "Tokens in a page.", _SIZE)
@click.option("--window", type=Integer(0), help="Keys before its own that a token sees.")
@click.option("--latent", is_flag=True, help="Values are the start of keys, as in absorbed MLA.")
@click.option("--calibrate", is_flag=True, help="Measure the rates here, in a few seconds.")
@_of_rank(
    "--threads --threads-per-rank", "32; measured: all CPUs", "Threads of a rank.", _MODEL_SIZE
)
@_of_rank("--gflops", "by dtype, see above", "Products of attention, all threads of a rank.", _RATE)
@_of_rank("--pack-rows", "24", "Packing a key, as rows of products with it.")
@_of_rank("--row-keys", "75", "What a row costs beside its products, as keys.")
@_of_rank("--call-us", "6", "Microseconds of a call of attention.")
@_of_rank("--gather-gbps", "1.25", "GB/s into a rank or host, and out of it.", _RATE)
@_of_rank("--latency-us", "200", "Microseconds of an exchange; a gather is two.")
@_of_rank("--message-us", "20", "Microseconds for each peer in an exchange.")
@_of_rank("--store-gbps", "4", "GB/s of gathered keys and values into the pool.", _RATE)
@click.option("--json", "json_path", type=_OUTPUT, help="Write all of it, rank by rank, to a file.")
def plan(json_path: Path | None, **options: Any) -> None:
    """Predict the time, balance and traffic of attention over many ranks.

    Work and bytes are exact: every rank's query-key pairs, and what it sends for keys and values
    in a layer. Times follow from rates of one rank and its network: given, measured here with
    --calibrate, or else assumed. Assumed rates are of ranks of 32 threads of an AMD EPYC with
    AVX512_BF16, each 440 GFLOP/s in bfloat16 (230 in float16 and float32), and of gloo over
    10 Gbit/s, whatever this machine is. The last lines say which, as options to give another time.

    Ranks gather the new keys and values into pools that all have everything, one thing after
    another, unless told otherwise. With --placement page_interleave or token_interleave each pool
    keeps every N-th page or token, and cached keys move, too. --exchange ring passes them on step
    by step, pass_q sends queries to the keys and outputs back, all_to_all cuts by heads, auto is
    the one that takes least. --overlap full hides what it can behind attention. Ranks of a host
    share its memory and its wire, of which --gather-gbps is the rate then. --decode predicts a
    step over shared pools: outputs and LSE are exchanged by heads.

    \b
    A prompt of 128 Ki tokens over 8, 16, ... 1024 ranks, with assumed rates:
      cpattn plan --cp-size 8..1024 --tokens 131072
    A batch with cached prefixes, rates of this machine, a network of 100 Gbit/s:
      cpattn plan --cp-size 4,8,12 --extend-lens 4096,700,9000 \\
          --prefix-lens 0,8192,512 --calibrate --gather-gbps 12.5
    The batches of a trace, with known rates:
      cpattn plan --trace trace.jsonl --cp-size 8 --threads 32 --gflops 9000
    A long prefix in pools that are shared out, over hosts of four ranks each:
      cpattn plan --hosts 2..16 --ranks-per-host 4 --tokens 4096 --prefix 524288 \\
          --placement page_interleave --exchange auto --overlap full
    Decoding 64 such sequences:
      cpattn plan --cp-size 8..64 --decode 64 --prefix 524288
    """
    if options["hosts"] and _is_given("cp_size"):
        raise click.UsageError("ranks are --cp-size, or --hosts times --ranks-per-host, not both")
    if options["decode"] and _is_given("strategy"):
        raise click.UsageError("--strategy cuts new tokens of a prefill; --decode has none to cut")
    importlib.import_module("rich")  # what is missing is said before anything is measured
    from ..cost_model.command import forecasts
    from ..cost_model.report import print_plan, write_json
    from .progress import make_progress

    message = torch_guard.prepare() if options["calibrate"] else None
    if message:
        click.echo(message, err=True)
    with make_progress("cpattn plan", "steps") as progress, refusals_by_option(), _failures():
        predictions, rates, sources = forecasts(progress=progress, **options)
    print_plan(predictions, rates, sources)
    if json_path:
        _write("JSON", json_path, lambda: write_json(json_path, predictions, rates, sources))


@commands.command(short_help="Replay serving traffic over several processes, and check it.")
@click.option(
    "--trace", type=_INPUT, help="Mooncake trace, .jsonl or .jsonl.gz [default: generated]."
)
@_option("--requests num_requests", 64, "Requests, from the start of the trace.", _REQUESTS)
@_option("--scale-lengths", 8, "Divide all lengths, blocks too; a divisor of 512.", _SIZE)
@_option("--seed", 1, "Seed of generated traffic, tokens and weights.", Integer(0, 2**64 - 1))
@_option("--cp-size", 2, "Processes of a pipeline stage, which share out its tokens.", _SIZE)
@_option("--pp-size", 1, "Pipeline stages, which share out the layers and take turns.", _SIZE)
@_option("--strategy", "zigzag", "How sequences are cut.", _STRATEGY)
@_option("--token-budget", 4096, "New tokens in a batch; longer prompts are cut.", _SIZE)
@_option("--max-sequences", 64, "Sequences in a batch.", _MODEL_SIZE)
@_option("--page-size", 32, "Tokens in a page; divides 512 / scale-lengths.", _SIZE)
@_option("--pool-tokens", 24576, "Tokens that the KV pool holds, in whole pages.", _SIZE)
@_option("--model", "dense", "Dense, or sparse attention as in DeepSeek-V3.2.", _MODEL)
@_of_model("--layers num_layers", "4; dsa: 1", "Decoder layers; dsa has one.", Integer(1, 1024))
@_of_model("--hidden-size", "512", "Width of the decoder.", _MODEL_SIZE)
@_of_model("--heads num_heads", "8; dsa: 16", "Query heads.", _HEADS)
@_of_model("--kv-heads num_kv_heads", "2", "dense: key/value heads.", _HEADS)
@_of_model("--head-dim", "64", "dense: width of a head.", _HEAD_DIM)
@_of_model("--intermediate-size", "1536", "Width of the MLP.", _MODEL_SIZE)
@_of_model("--index-heads", "16", "dsa: heads of the indexer.", _HEADS)
@_of_model("--topk", "512", "dsa: keys that the indexer chooses for a query.", _MODEL_SIZE)
@_of_model("--q-lora-rank", "512", "dsa: width of the latent of queries.", _MODEL_SIZE)
@_of_model("--kv-dtype", "auto", "Of the KV pool; auto, bf16: as --dtype.", _KV_DTYPE)
@_of_model("--prefill-impl", "flashmla_kv", "dsa: flashmla_sparse expands FP8 rows first.", _IMPL)
@click.option("--disaggregate", is_flag=True, help="Decode, in another process.")
@_of_model("--decode-tokens", "8", "Of each request, at most its output_length.", _MODEL_SIZE)
@_option("--dtype", "auto", "auto: bfloat16 if the CPU multiplies it.", click.Choice(DTYPES))
@_option("--threads num_threads", 0, "Of a process; 0: cores / processes.", Integer(0))
@_option("--check/--no-check", True, "Compare with one process without cache.")
@_of_model("--check-rows", "16", "Rows compared of each sequence in a batch.")
@_option("--torch-baseline/--no-torch-baseline", True, "Time torch on the same batches.")
@click.option("--json", "json_path", type=_OUTPUT, help="Write everything measured to this file.")
@click.option("--html", "html_path", type=_OUTPUT, help="Write a report with plots to this file.")
@click.option(
    "--guide/--no-guide",
    default=None,
    help="Say at the end what was seen and what to try next.",
    show_default="on a terminal",
)
def replay(
    trace: Path | None,
    json_path: Path | None,
    html_path: Path | None,
    guide: bool | None,
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

    With --model dsa the decoder is one layer of sparse attention: an indexer scores all keys of a
    query by a small product of its own, and latent attention (MLA) reads the TOPK best ones. The
    check compares the choice with scores in float64, and attention with dense attention to the
    same keys. With --disaggregate latents, rotary parts and keys of the indexer are sent.

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
    Sparse attention over an FP8 cache, with the heads and the top-k of DeepSeek-V3.2:
      cpattn replay --model dsa --kv-dtype fp8 --requests 8 --heads 128 --index-heads 64 \\
          --topk 2048 --q-lora-rank 1536 --no-torch-baseline
    """
    for name in ("rich", "jinja2", "matplotlib") if html_path else ("rich",):
        importlib.import_module(name)  # what is missing is said at once, not after the run
    if json_path and html_path and json_path.absolute() == html_path.absolute():
        raise click.UsageError(f"--json and --html must be two files, both are {json_path}")
    message = torch_guard.prepare()
    from ..replay.command import check_room, read_requests, settings_of
    from ..replay.driver import replay as run
    from ..replay.report.guide import guide_lines
    from ..replay.report.summary import print_report, write_json
    from .progress import make_progress

    with refusals_by_option():
        requests = read_requests(trace, options.pop("num_requests"), options["seed"])
        settings = settings_of(**options)
        warning = check_room(requests, settings)
    for line in filter(None, (message, warning)):
        click.echo(line, err=True)
    with _failures(), make_progress("cpattn replay", "prompt tokens") as progress:
        report = run(requests, settings, progress=progress)
    title = trace.name if trace else "generated traffic"
    print_report(report, title)
    if json_path:
        _write("JSON", json_path, lambda: write_json(report, json_path))
    if html_path:
        from ..replay.report.html import write_html

        _write("report", html_path, lambda: write_html(report, title, html_path))
    if guide or (guide is None and streams.is_terminal()):
        click.echo("\n" + "\n".join(guide_lines(report, streams.width())))
    if not report.passed:
        click.get_current_context().exit(1)


@commands.command(short_help="Say what this machine and environment will do.")
@click.option("--json", "as_json", is_flag=True, help="For machines: JSON on standard output.")
def doctor(as_json: bool) -> None:
    """Say what this machine and environment will do with cpattn.

    Instruction set, threads, memory, torch and its guard, engines and their releases, plug-ins,
    and what is missing for what, with the line that installs it; then attention on every
    instruction set of this machine against the oracle. Needs a second or two.

    Lines with ! are warnings, those with x are broken, those with - are worth to know. Exit code 1
    if something is broken: attention differs from the oracle, a variable cannot be used, or torch
    would die.

    \b
    What will happen here:
      cpattn doctor
    The same for a program:
      cpattn doctor --json
    What the portable kernels would do:
      CPATTN_ISA=portable cpattn doctor
    """
    from .doctor import report

    found = list(report.findings())
    if as_json:
        click.echo(report.as_json(found))
    else:
        width = streams.width() or streams.DEFAULT_WIDTH
        colours = streams.is_terminal() and not os.environ.get("NO_COLOR")
        click.echo(report.as_text(found, width, colours=colours))
    if not report.is_well(found):
        click.get_current_context().exit(1)


@contextmanager
def _failures() -> Iterator[None]:
    """Turn what may fail at run time into one line: a process that died, an engine not there."""
    from .._workers import WorkerError

    try:
        yield
    except ModuleNotFoundError:
        raise  # `cli` says how to install it
    except WorkerError as error:
        raise click.ClickException(f"{error}; all processes ended") from None
    except (RuntimeError, ImportError) as error:
        raise click.ClickException(" ".join(str(error).split())) from None


def _write(what: str, path: Path, write: Callable[[], None]) -> None:
    """Write a file and say so; or in one line that it failed."""
    try:
        write()
    except OSError as error:
        raise click.ClickException(f"writing {path}: {error.strerror or error}") from None
    click.echo(f"{what} written to {path}")
