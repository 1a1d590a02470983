# SPDX-License-Identifier: Apache-2.0
"""Refusals of the command line: one line that names option, rule and value."""

import json
import re

import pytest

from cpattn.scheduling.request import Request
from cpattn_lab.replay import command
from cpattn_lab.replay.command import check_room
from cpattn_lab.replay.footprint import footprint
from cpattn_lab.replay.records import ReplayOptions
from cpattn_terminal.commands import commands
from support.command_line import QUICK, Reached, invoke_to_beginning

ABSURD = (
    *("0", "-1", str(2**31), str(2**63), str(2**64), "9" * 5000),
    *("nan", "inf", "-inf", "1e400", "1.5", "", " ", "x", "0x10", "1,2", "1..2..3"),
)
ENOUGH = {
    **dict.fromkeys(("replay", "simulate", "lint", "zoo", "bind"), ()),
    "explain": ("--lens", "13,40"),
    "plan": ("--cp-size", "2"),
    "conform": ("my_kernels:attention", "--signature", "sdpa"),
}
# Options whose names may be absurd: names of files, and of other software.
FILES = ("--trace", "--json", "--html")
NAMES = (
    *FILES, "--capture", "--shrink-to", "--signature", "--without", "--device",
    "--own-module", "--only",
)  # fmt: skip
OPTIONS = [
    (name, option)
    for name, subcommand in commands.commands.items()
    for parameter in subcommand.params
    if not getattr(parameter, "is_flag", False)
    and (option := max(parameter.opts, key=len)).startswith("--")
    and option not in NAMES
]
# Choices that are also names in the library; messages have no other names of it.
CHOICES = (
    *("flashmla_kv", "flashmla_sparse", "page_interleave", "token_interleave"),
    *("pass_q", "all_to_all"),
)


def refusal(*arguments: str) -> str:
    result = invoke_to_beginning(*arguments)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2
    assert result.stdout == ""
    assert re.fullmatch(r"Error: .*\n", result.stderr)
    return result.stderr.removeprefix("Error: ").rstrip("\n")


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_absurd_values_are_refused_in_a_line_that_names_the_option(name, option):
    refused = 0
    for value in ABSURD:
        script = (__file__,) if name == "simulate" else ()
        result = invoke_to_beginning(name, *ENOUGH[name], f"{option}={value}", *script)
        if result.exit_code == 0 or isinstance(result.exception, Reached):
            continue  # 0 of --seed, for example, is not absurd
        assert isinstance(result.exception, SystemExit), (value, result.exception)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert option in result.stderr
        words = re.sub(f"'({'|'.join(CHOICES)})'", "", result.stderr)
        assert not re.search(r"[a-z]_[a-z]|[a-z][A-Z]|----", words), words
        refused += 1
    assert refused > 5


#: Arguments, and the line on stderr.
WRONG = r"""
explain --lens 1,x => must be a comma-.* list of integers from 0 to 2147483647, got 'x' in '1,x'
explain --lens 3,4 --prefix 1 => --prefix must have as many elements as --lens, 2, got 1
explain --lens 9000000,9000000 => --lens must add up to at most 16777216 tokens, got 18000000
explain --lens 3 --prefix 2147483647 => --lens and --prefix must .* most 2147483647 tokens
replay --scale-lengths 3 => --scale-lengths must be a power of two .* 512, got 3
replay --heads 3 => --heads must be a multiple of --kv-heads 2, got 3
replay --head-dim 577 => --head-dim.* must be an integer from 1 to 576, got '577'
replay --model dsa --layers 2 => --layers must be 1 with --model dsa, got 2
replay --model dsa --kv-heads 2 => --kv-heads is an option of --model dense, not of --model dsa
replay --topk 8 => --topk is an option of --model dsa, not of --model dense
replay --model dsa --dtype float16 => --dtype must be bfloat16 or float32 with --model .* float16
replay --model dsa --kv-dtype fp8 --dtype float32
  => must be bfloat16 with --kv-dtype fp8, got float32
replay --model dsa --prefill-impl flashmla_kv => it needs --kv-dtype fp8
replay --model dsa --kv-dtype int8 => --kv-dtype must be auto, bf16 or fp8 with .*, got int8
replay --weights 4,1,1 => --weights must be 2 numbers above 0, .* got 4,1,1
replay --weights 4,1 --strategy interleave => --weights must be .* --strategy zigzag or contiguous
replay --pp-size 5 => --pp-size must be at most the number of layers, 4, got 5
replay --decode-tokens 4 => --decode-tokens 4 needs --disaggregate
replay --no-check --check-rows 4 => --check-rows 4 needs --check, got --no-check
replay --page-size 48 => must divide 512 / --scale-lengths 8 = 64, got 48; one of 1, 2, .* does
replay --pool-tokens 10 => at least a page \(--page-size 32\), got 10
replay --pool-tokens 64 => --pool-tokens must hold the longest prompt, .* so be at least .*, got 64
replay --pool-tokens 2000000000 => take .* GiB, this machine has .* GiB: choose
replay --threads 10000 => --threads must be at most .* for 2 processes, got 10000; 0
replay --head-dim 5 => --head-dim must be even, .* got 5
replay --cp-size 5000 => --cp-size times --pp-size must be at most .* got 5000 x 1
replay --disaggregate --decode-ranks 5000 => --pp-size and --decode-ranks must .* 2 x 1 and 5000
replay --placement striped => must be 'replicated', 'page_interleave' or .* got 'striped'
replay --exchange ring => must be auto or gather where the placement is replicated, got ring
replay --placement page_interleave --model dsa --exchange ring => auto, gather or pass_q for .* dsa
replay --placement page_interleave --kv-dtype int8 --exchange gather
  => --exchange must be auto or pass_q for int8, .* got gather
replay --placement page_interleave --cp-size 4 --pool-tokens 100
  => at least a page of each rank, 128, got
replay --placement token_interleave --disaggregate
  => replicated or page_interleave where pages are sent
replay --against-replicated => --against-replicated needs --placement, got replicated
replay --against-replicated --placement page_interleave --no-check
  => --against-replicated compares rows: it needs --check, got --no-check
replay --decode-ranks 2 => --decode-ranks 2 needs --disaggregate
replay --disaggregate --model dsa --decode-ranks 2 => --decode-ranks must be 1 for .* dsa, got 2
replay --hosts 3 => --hosts must divide the 2 ranks that prefill, .* got 3
plan --gather-gbps 1 => No such option .*Did you mean .*--gather-gb-per-s
replay --link-gbps 1 => --link-gbps must have hosts whose cables .* got 1 and one host
replay --json a --html a => --json and --html must be two files, both are a
replay --html /nowhere/r.html => Directory '/nowhere' does not exist
replya => No such command 'replya'.*replay
plan --heads 3 => --heads must be a multiple of --kv-heads = 8, got 3
plan --cp-size 5000 => must be a number of ranks from 1 to 4096, a list like 8,16,48 or a
plan --tokens 4 --extend-lens 3 => a batch comes from one of --tokens and --prefix, --ext
plan --extend-lens 3,4 --prefix-lens 1 => must have as many elements as --extend-lens, 2, got 1
plan --requests 9 => --requests and --token-budget are of a --trace, but there is none
plan --prefix-lens 3 => --prefix-lens needs --extend-lens
plan --extend-lens 0,0 => --extend-lens must have a sequence with new tokens, got none
plan --hosts 2 --cp-size 4 => ranks are --cp-size, or --hosts times --ranks-per-host, not
plan --exchange usp => --mesh must be given where exchange is usp
plan --mesh 4x2 => mesh must be of shared out pools and one rank for each host
plan --mesh 4x => '--mesh': must be two numbers whose product is 1 to 4096 ranks, as 4x2
plan --mesh 4x2 --cp-size 8 => ranks are those of --mesh, without --cp-size and --hosts
plan --mesh 4x2 --decode 4 --prefix 9 => --mesh is of new tokens of a prefill
plan --ranks-per-host 2 => --ranks-per-host needs --hosts, their number
plan --hosts 4096 --ranks-per-host 2 => must be at most 4096 ranks, got 8192
plan --exchange pass_q => --exchange must be gather, ring, all_to_all where placement is
plan --decode 4 => --decode needs one of --prefix, of all sequences, and --prefix-lens
plan --decode recorded --prefix 9 => --decode recorded takes lengths of a --capture
plan --decode 4 --prefix 9 --tokens 3 => it takes --prefix or --prefix-lens alone
plan --decode 4 --prefix-lens 9 => --prefix-lens must have as many elements as --decode, 4
plan --decode 4 --prefix 9 --exchange ring => --exchange must be one of all_to_all, gather
plan --tokens 9 --out-heads all => --out-heads is of a step of --decode
plan --decode 4 --prefix 9 --strategy zigzag => --strategy cuts new tokens of a prefill;
plan --decode 4 --prefix 9 --overlap full => --overlap is of new tokens of a prefill
plan --decode 4 --prefix 9 --placement replicated => --placement must be page_interleave or
conform a:b --signature cpattn --require COW => must be of OWN, COV
conform a:b => Missing option '--signature'
simulate => a SCRIPT or --capture must be given
simulate --capture run.cpcap --seed 1 => neither a SCRIPT nor --seed nor
simulate --capture run.cpcap pyproject.toml => neither a SCRIPT nor --seed nor
simulate --strategy zigzag pyproject.toml => --strategy is of the batches of --capture
lint => a PLAN or --capture must be given
zoo --only nonsense => no bug of the zoo is called 'nonsense'
plan --calibrate --threads 10000 => --threads must be at most .* measured .* got 10000
"""


@pytest.mark.parametrize("wrong", re.sub(r"\n  =>", " =>", WRONG).strip().splitlines())
def test_a_wrong_argument_is_named(wrong):
    arguments, message = wrong.split(" => ")
    assert re.search(message, refusal(*arguments.split()))


@pytest.mark.parametrize("option", FILES[1:])
@pytest.mark.parametrize("value", ["", "/", "/nowhere/r", "x" * 5000])
def test_a_file_that_cannot_be_written_is_refused(option, value):
    assert option in refusal("replay", f"{option}={value}")


def test_a_line_and_pages_of_a_trace_are_named(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 0}\n')
    for name in ("replay", "plan"):
        message = refusal(name, "--trace", str(path))
        assert message == f"{path}: line 1: input_length must be an integer >= 1, got 0"
    record = {"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [0]}
    path.write_text(json.dumps(record))
    message = refusal("plan", "--trace", str(path), "--page-size", "100")
    assert message == "--page-size must divide the 512 tokens of a hash block, got 100"


def test_what_a_machine_cannot_do_is_said_before(monkeypatch):
    monkeypatch.setattr(command, "num_cpus", lambda: 2)
    monkeypatch.setattr(command, "memory", lambda: (64 << 30, 8 << 30))
    requests = [Request(0, 4096, 1, tuple(range(8)))]
    assert check_room(requests, ReplayOptions()) is None
    warning = check_room(requests, ReplayOptions(cp_size=64))
    assert warning
    assert re.fullmatch(
        r"warning: 64 processes take turns on 2 CPUs: expect 2.1 min until all have started, slow "
        r"batches, and about 2\d.\d GiB of memory, of which 8.0 GiB are free",
        warning,
    )
    monkeypatch.setattr(command, "num_cpus", lambda: 64)
    warning = check_room(requests, ReplayOptions(cp_size=64))
    assert warning
    assert warning.startswith("warning: 64 processes will take about 2")
    monkeypatch.setattr(command, "memory", lambda: (1 << 20, 1 << 20))
    with pytest.raises(ValueError, match=r"take 0\.\d GiB, this machine has 0.0 GiB: choose a"):
        check_room(requests, ReplayOptions())
    monkeypatch.setattr(command, "memory", lambda: (0, 0))  # unknown
    assert check_room(requests, ReplayOptions()) is None


def test_replicated_pools_to_compare_with_must_fit_too(monkeypatch):
    monkeypatch.setattr(command, "memory", lambda: (2 << 30, 2 << 30))
    sizes = ("--cp-size", "8", "--pool-tokens", "131072")
    sharded = ("replay", "--placement", "page_interleave", *sizes)
    assert isinstance(invoke_to_beginning(*sharded).exception, Reached)
    message = refusal(*sharded, "--against-replicated")
    assert message.startswith("replicated pools and weights of 8 processes take ")


def test_a_warning_comes_before_the_processes(monkeypatch):
    monkeypatch.setattr(command, "num_cpus", lambda: 1)
    result = invoke_to_beginning("replay", "--cp-size", "3")
    assert isinstance(result.exception, Reached)
    assert result.stderr.startswith("warning: 3 processes take turns on 1 CPU: expect ")
    assert result.stderr.count("\n") == 1


def test_memory_is_that_of_pools_and_weights():
    small, large = ReplayOptions(), ReplayOptions(pool_tokens=32768 + 1024)
    per_token = 4 * 2 * 2 * 64 * 4  # layers, keys and values, heads, width, float32
    assert footprint(large, 1).arrays - footprint(small, 1).arrays == 2 * 1024 * per_token
    decoding = ReplayOptions(decode_tokens=8)
    assert footprint(decoding, 1).arrays > footprint(small, 1).arrays + 32768 * per_token


@pytest.mark.parametrize("stream", ["stdout", "stdin", "stderr"])
def test_closed_streams(command_line, stream):
    number = {"stdin": "0<&-", "stdout": "1>&-", "stderr": "2>&-"}[stream]
    result = command_line.shell(f"plan --cp-size 2,4 {number}")
    if stream == "stdout":
        assert result.stderr == "Error: standard output: Bad file descriptor\n"
        assert result.returncode == 1
    else:
        assert result.stderr == ""
        assert result.returncode == 0
        assert len(result.stdout) > 100


@pytest.mark.slow
def test_a_replay_needs_no_stdin_and_says_that_a_disk_is_full(command_line):
    result = command_line.shell(" ".join([*QUICK, "--requests=2", "--json=/dev/full", "0<&-"]))
    assert result.returncode == 1
    assert "passed" in result.stdout
    assert result.stderr.endswith("Error: writing /dev/full: No space left on device\n")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["explain --lens 13,40", "plan --cp-size 2,4", "--help"])
def test_a_full_disk(command_line, command):
    result = command_line.shell(f"{command} > /dev/full")
    assert result.stderr == "Error: standard output: No space left on device\n"
    assert result.returncode == 1


@pytest.mark.parametrize(
    "command", ["explain --lens 9999 --cp-size 4096", "plan --cp-size 1..4096", "plan --help"]
)
def test_a_reader_that_has_seen_enough(command_line, command):
    result = command_line.shell(f"{command} | head -n 1", pipefail=True)
    assert result.stderr == ""
    assert result.stdout.count("\n") == 1
    assert result.returncode in (0, 141)  # all of it may have fitted into the pipe
