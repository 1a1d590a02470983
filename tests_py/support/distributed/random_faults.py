# SPDX-License-Identifier: Apache-2.0
"""Random faults of ranks, round after round, as in `make soak`; one round again by ``python -m
support.distributed.random_faults --only 12345``."""

import argparse
import itertools
import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any

os.environ.update(CPATTN_NUM_THREADS="1", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

from support.distributed import fault_rounds
from support.distributed.fault_rounds import EXCHANGES, FAULTS, HARMLESS, TRANSPORTS, Round
from support.distributed.fault_worlds import Answer, Outcome, run_round, warm_up
from support.time_limits import BUSY

_CALL = r"(ContextParallel\.\w+|MHATokenToKVPool)( \(\w+\))?: "
CUTS = ("cut a cable", "cut all cables")


def complaints(one: Round, outcome: Outcome) -> list[str]:
    found = [f"left behind: {what}" for what in outcome.left_behind]
    for rank, answer in enumerate(outcome.answers):
        found += [f"rank {rank} left behind: {what}" for what in answer.left_behind]
        wrong = _wrong(one, rank, answer, outcome)
        if wrong:
            since = answer.told - outcome.fault_time if answer.told and outcome.fault_time else 0
            found.append(
                f"rank {rank} {wrong}: {answer.error or 'no error'} {list(answer.refusals) or ''}, "
                f"call {answer.call}, {since:.3f} s after the fault"
            )
    return found


def _wrong(one: Round, rank: int, answer: Answer, outcome: Outcome) -> str | None:
    is_culprit = rank == one.culprit
    if one.fault in HARMLESS or not outcome.fault_time:
        return "failed without a fault" if answer.died or answer.error else None
    if one.fault in ("plan", "arguments"):
        return _wrong_refusal(one, rank, answer)
    if is_culprit:
        return _wrong_culprit(one, answer)
    if answer.died:
        return "died, which had no fault"
    if answer.error is None:
        return "had no error"
    if not re.match(rf"(RuntimeError|MemoryError): {_CALL}", answer.error):
        return "does not name the call"
    named = re.search(r": (?:cpattn of )?rank ([\d, ]+?)(?: of| cannot| is| refused)", answer.error)
    culprits = {int(name) for name in named[1].split(",")} if named else set()
    if one.fault == "version":
        culprits |= {int(name) for name in re.findall(r"of rank (\d+)", answer.error)}
    if one.culprit not in culprits and not (one.fault.startswith("cut") and culprits):
        return "does not name the culprit"
    # A rank that ended by its own error before another one looked counts as ended, too.
    all_ended = answer.error.count("has ended") == len(culprits)
    others_may_be = all_ended or one.fault in (*CUTS, "version")
    if culprits != {one.culprit} and not others_may_be:
        return "also names others"
    # A rank waits for others that wait for a processor, like this process.
    busy = BUSY + one.size * outcome.stalled
    if answer.told - outcome.fault_time > one.limit + busy:
        return f"was told later than {one.limit} s"
    return None


def _wrong_refusal(one: Round, rank: int, answer: Answer) -> str | None:
    if answer.died or answer.error:
        return "could not go on behind a refusal"
    own = one.fault == "arguments" and rank == one.culprit
    pattern = {
        "plan": r"RuntimeError: ContextParallel\.\w+: [\w ]+ of rank \d differs from rank \d; "
        "nothing was sent",
        "arguments": r"TypeError: ContextParallel\.\w+: plan must be"
        if own
        else rf"RuntimeError: ContextParallel\.\w+: rank {one.culprit} refused its arguments",
    }[one.fault]
    if not all(re.match(pattern, told) for told in answer.refusals) or not answer.refusals:
        return "was not told of the difference"
    return None


def _wrong_culprit(one: Round, answer: Answer) -> str | None:
    if one.fault in ("kill", "kill in flight", "stop and kill"):
        return None if answer.died or one.fault == "kill in flight" else "was not killed"
    if answer.died:
        return "died"
    if answer.error is None:
        return "had no error"
    if one.fault == "memory":
        return None if answer.error.startswith("MemoryError: ") else "has another error"
    return None if re.match(rf"(RuntimeError|MemoryError): {_CALL}", answer.error) else "is odd"


def play(seed: int, options: argparse.Namespace) -> tuple[Round, list[str], bool]:
    """Play one round; return it, its faults, and whether its fault came."""
    if options.in_turns:
        one = fault_rounds.in_turns(seed)
    else:
        one = fault_rounds.draw(seed, options.fault, options.exchange, options.transport)
    outcome = run_round(one)
    if options.verbose:
        print(*(f"  rank {rank}: {said}" for rank, said in enumerate(outcome.answers)), sep="\n")
        print(f"  fault at {outcome.fault_time}, stalled for {outcome.stalled:.3f} s")
    return one, complaints(one, outcome), outcome.fault_time > 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(";")[0])
    add = parser.add_argument
    add("--rounds", type=int, help="number of rounds (default: until --seconds are over)")
    add("--seconds", type=float, default=3600, help="longest time, in seconds (%(default)s)")
    add("--seed", type=int, default=int(time.time()), help="first round (default: the time)")
    add("--in-turns", action="store_true", help="all faults, by two transports, in 33 rounds")
    add("--only", type=int, help="the round with this seed alone, and all that its ranks say")
    add("--fault", choices=FAULTS, help="fault of all rounds")
    add("--exchange", choices=EXCHANGES, help="exchange of all rounds")
    add("--transport", choices=TRANSPORTS, help="transport of all rounds, of three ranks and more")
    add("--jobs", type=int, default=4, help="worlds at a time, which mostly wait (default: 4)")
    options = parser.parse_args()
    options.verbose = options.only is not None
    warm_up()
    if options.only is not None:
        one, found, came = play(options.only, options)
        print(one, "" if came else "(which did not come)", *found, sep="\n  ")
        return bool(found)
    return _soak(options)


def _soak(options: argparse.Namespace) -> int:
    """Play rounds in parallel worlds, each with a process that watches it."""
    begin, counts, failed = time.monotonic(), Counter(), 0
    seeds = itertools.islice(itertools.count(options.seed), options.rounds)
    running: set[Future[Any]] = set()
    print(f"Seed {options.seed}", flush=True)

    def summary() -> str:
        return f"{counts.total()} rounds in {time.monotonic() - begin:.0f} s, {failed} failed"

    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("fork")) as pool:
        while True:
            if time.monotonic() - begin < options.seconds and failed < 10:
                more = itertools.islice(seeds, options.jobs - len(running))
                running |= {pool.submit(play, seed, options) for seed in more}
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for one, found, came in (future.result() for future in done):
                counts[one.fault if came else "none"] += 1
                if found:
                    failed += 1
                    print(one, *found, f"again: --only {one.seed}", sep="\n  ", flush=True)
                if counts.total() % 100 == 0:
                    print(summary(), flush=True)
    print(f"{summary()}: {', '.join(f'{n} {name}' for name, n in counts.most_common())}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
