# SPDX-License-Identifier: Apache-2.0
"""`cpattn simulate`: all ranks of a script, or of a recorded run, in one process."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click

from cpattn_terminal.command_group import OWN_PROCESS, CommandGroup
from cpattn_terminal.exit_codes import INTERRUPTED
from cpattn_terminal.options import Integer, Number, OutputPath

from .options import require_option

CommandGroup.examples["simulate"] = "cpattn simulate --ranks 8 script.py"


@click.command(
    short_help="Run all ranks of a torch.distributed script in one process; find hangs.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "--ranks",
    type=Integer(1, 64),
    default=8,
    help="Number of ranks.  [default: 8, or those of --capture]",
)
@click.option(
    "--capture",
    "captures",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Replay the messages of a recorded run, not a script; give it once for each rank.",
)
@click.option(
    "--strategy",
    type=click.Choice(("zigzag", "interleave", "contiguous")),
    help="Strategy for planning the batches of --capture again.",
)
@click.option(
    "--seed",
    "seeds",
    type=Integer(0, 2**31),
    multiple=True,
    help="Seed of an order in which ranks run; may be repeated.  [default: 0, 1 and 2]",
)
@click.option(
    "--time-limit",
    type=Number(0.1, 86400),
    default=60.0,
    help="Time limit of a run, in seconds.",
    show_default=True,
)
@click.option("--buffered-sends", is_flag=True, help="Let sends end before they are received.")
@click.option(
    "--latency-us",
    type=Number(0, 1e9),
    default=10.0,
    help="Latency of a message, in microseconds.",
    show_default=True,
)
@click.option(
    "--gbps",
    type=Number(1e-3, 1e6),
    default=100.0,
    help="Rate of a rank's link, in Gbit/s.",
    show_default=True,
)
@click.option(
    "--own-module",
    "own_modules",
    multiple=True,
    metavar="NAME",
    help="Package that each rank imports for itself; may be repeated.",
)
@click.option(
    "--cuda-as-cpu/--no-cuda-as-cpu",
    default=None,
    help="Run calls of CUDA on the CPU.  [default: where there is no device]",
)
@require_option
@click.option("--trace", type=OutputPath(), help="Write the timeline, for ui.perfetto.dev.")
@click.option("--html", type=OutputPath(), help="Write report and timeline as a page to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON alone.")
@click.argument(
    "script", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def simulate(
    script: Path | None,
    arguments: tuple[str, ...],
    captures: tuple[Path, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Run a script as torchrun would start it, all ranks in one process and one at a time, and say
    why it hangs, or would: calls that differ between ranks, messages without an end, tensors used
    before their wait, results that depend on who comes first.

    Whatever backend the script names is simulated. Options stand before the script; what follows it
    is the script's. Exit code 0: proved, 1: refuted, by an assertion of the script, too, 2: the
    script cannot be judged, as it raises another error of its own, or --require names what was not
    checked.

    \b
    Eight ranks, and a timeline under links of 25 Gbit/s:
      cpattn simulate --gbps 25 --trace timeline.json train.py --layers 2
    The order that a finding names, again:
      cpattn simulate --ranks 4 --seed 2 train.py
    What two ranks recorded under cpattn.captures.capture, issued again, and over 16:
      cpattn simulate --capture run.0.cpcap --capture run.1.cpcap
      cpattn simulate --capture run.0.cpcap --capture run.1.cpcap --ranks 16
    """
    from ..findings import NOT_USABLE, NotUsable

    options["require"] = options.pop("required")
    if captures:
        simulated = partial(_captures, captures, script, options)
    elif script is None:
        raise click.UsageError("a SCRIPT or --capture must be given")
    else:
        simulated = partial(_script, script, arguments, options, as_json)
    try:
        report = simulated()
    except NotUsable as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        click.echo(f"Error: {' '.join(str(error).split())}", err=True)
        sys.stderr.flush()
        _end(NOT_USABLE)
    except KeyboardInterrupt:
        _leave_ranks_behind(INTERRUPTED)
        raise
    click.echo(report.to_json() if as_json else _text(report))
    _end(report.exit_code)


def _end(status: int) -> NoReturn:
    _leave_ranks_behind(status)
    click.get_current_context().exit(status)


def _leave_ranks_behind(status: int) -> None:
    """Make the process end with `status`, whatever the script has registered for the end.

    Handlers of the script may end the process by a status of their own. Threads of ranks may still
    run, or hold what torch ends in C++, which aborts the process while Python ends. A command that
    is called within another program leaves that program alone unless ranks go on.
    """
    scheduler = sys.modules.get("cpattn_proof.simulation.scheduler")  # not where torch is refused

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)

    is_left = scheduler is not None and scheduler.are_left()
    if is_left or click.get_current_context().find_root().obj is OWN_PROCESS:
        atexit.register(leave)  # runs first, as what is registered last does


def _script(
    script: Path, arguments: tuple[str, ...], options: dict[str, Any], as_json: bool
) -> Any:
    from ..simulation.simulate import simulate_script

    _warn_of_misplaced(script, arguments)
    if options.pop("strategy") is not None:
        raise click.UsageError("--strategy is of the batches of --capture")
    if seeds := options.pop("seeds"):
        options["seeds"] = tuple(dict.fromkeys(seeds))
    return simulate_script(script, arguments, quiet=as_json, **options)


def _warn_of_misplaced(script: Path, arguments: tuple[str, ...]) -> None:
    """Say which arguments of the script may have been meant for the simulation."""
    known = {name for param in click.get_current_context().command.params for name in param.opts}
    for name in dict.fromkeys(argument.partition("=")[0] for argument in arguments):
        if name in known:
            click.echo(
                f"Warning: {name} stands after {script} and is given to it; options of cpattn "
                "simulate stand before the script",
                err=True,
            )


def _captures(captures: tuple[Path, ...], script: Path | None, options: dict[str, Any]) -> Any:
    from ..captures import read_captures
    from ..simulation.recorded import simulate_capture

    of_scripts = [options.pop(name) for name in ("seeds", "own_modules", "cuda_as_cpu")]
    if script is not None or any(value not in ((), None) for value in of_scripts):
        raise click.UsageError(
            "--capture issues what was recorded: neither a SCRIPT nor --seed nor --own-module nor "
            "--cuda-as-cpu goes beside it"
        )
    if _is_default("ranks"):
        options["ranks"] = None
    return simulate_capture(read_captures(captures), **options)


def _is_default(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.DEFAULT


def _text(report: Any) -> str:
    lines = [report.text(), "", "calls and bytes sent, of the rank that sends most:"]
    for kind, sent in report.facts["sent_bytes_by_rank"].items():
        calls = max(report.facts["calls_by_rank"][kind])
        lines.append(f"  {kind:<24} {calls:>7} calls {max(sent):>14,} bytes")
    slowest = max(report.facts["predicted_seconds_by_rank"])
    recorded = report.facts.get("recorded_seconds_by_rank")
    computed = "CPU time" if recorded is None else "recorded computation"
    lines.append(f"  predicted: {slowest * 1e3:.3f} ms, of {computed} and of the links given")
    if recorded is not None:
        lines.append(f"  recorded: {max(recorded) * 1e3:.3f} ms")
    return "\n".join(lines)
