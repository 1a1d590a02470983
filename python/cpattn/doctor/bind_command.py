# SPDX-License-Identifier: Apache-2.0
"""`cpattn bind`, the command that starts a rank on its share of the CPUs of a host."""

from __future__ import annotations

import os
from pathlib import Path

import click

from cpattn_terminal.command_group import CommandGroup
from cpattn_terminal.options import Integer

from .._numa import ranges
from . import binding

CommandGroup.examples["bind"] = "cpattn bind --ranks 2"
_ROOT = Path("/")
_THREADS = ("OMP_NUM_THREADS", "CPATTN_NUM_THREADS")


@click.command(
    short_help="Start a rank on the cores and the memory of its NUMA node.",
    context_settings={"allow_interspersed_args": False},  # options behind COMMAND belong to COMMAND
)
@click.option(
    "--ranks", type=Integer(1, 4096), help="Number of ranks on this host [default: as launched]."
)
@click.option("--smt", is_flag=True, help="Add the other hardware threads of each core.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def bind(ranks: int | None, smt: bool, command: tuple[str, ...]) -> None:
    """Start COMMAND on the cores of its rank, or show the cores of each rank.

    Started once for each rank, by torchrun, Open MPI, MPICH or Slurm, it binds the process to its
    share of the CPUs that it may use, sets OMP_NUM_THREADS and CPATTN_NUM_THREADS to its cores, and
    becomes COMMAND. Memory lies on the node whose thread writes it first: on that of the rank. The
    launcher must leave all CPUs to each rank: mpirun --bind-to none, srun --cpu-bind=none.

    Ranks are divided over NUMA nodes, then over the cores of a node. Without COMMAND it
    shows the cores of each rank, and the lines that give them to vLLM and sglang, which bind ranks
    themselves.

    \b
    Two ranks of a model, each on a socket:
      torchrun --no-python --nproc-per-node 2 cpattn bind -- COMMAND
    Cores of each of four ranks, and the lines for engines:
      cpattn bind --ranks 4
    """
    own = binding.local_rank(os.environ)
    if command and own is None:
        known = ", ".join(binding.LAUNCHERS)
        raise click.UsageError(f"no launcher says which rank this is: start it by one of {known}")
    number = ranks or (own[1] if own else 1)
    if number is None:
        raise click.UsageError("--ranks must be given: the launcher does not say it for this host")
    if own and own[0] >= number:
        raise click.UsageError(f"--ranks must be more than this rank {own[0]}, got {number}")
    usable = os.sched_getaffinity(0)
    try:
        shares = binding.shares(_ROOT, usable, number, smt=smt)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if not command:
        _show(shares)
        return
    assert own is not None
    share = shares[own[0]]
    os.sched_setaffinity(0, share.cpus)
    threads = dict.fromkeys(_THREADS, str(share.num_cores))
    try:
        os.execvpe(command[0], list(command), os.environ | threads)
    except (OSError, ValueError) as error:  # ValueError: of an empty name
        raise click.UsageError(f"{command[0]}: {getattr(error, 'strerror', error)}") from None


def _show(shares: list[binding.Share]) -> None:
    from cpattn_terminal.tables import Row, print_table

    rows = [
        Row((str(rank), ",".join(share.nodes), str(share.num_cores), ranges(share.cpus)))
        for rank, share in enumerate(shares)
    ]
    header = ("rank", "node", "cores", "CPUs")
    print_table("ranks of this host", header, rows, less_important=(), left=("CPUs",))
    cores = [share.num_cores for share in shares]
    if min(cores) < max(cores):
        click.echo(f"\nThe rank with {min(cores)} cores is slower than that with {max(cores)}.")
    together = "|".join(ranges(share.cpus) for share in shares)
    click.echo(f"""
vLLM    export VLLM_CPU_OMP_THREADS_BIND='{together}'
sglang  export SGLANG_CPU_OMP_THREADS_BIND='{together}'
others  torchrun --no-python --nproc-per-node {len(shares)} cpattn bind -- COMMAND""")
