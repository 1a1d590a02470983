# SPDX-License-Identifier: Apache-2.0
"""Rounds of random faults, each drawn from its seed alone: what the ranks do, what goes wrong, and
when it must be told."""

import random
from dataclasses import dataclass, replace

from support.distributed.prefill_batches import Case
from support.distributed.sharded_worker import EXCHANGES as SHARDED
from support.distributed.sharded_worker import Step

CASES = (
    Case("two requests", (5, 13), (4, 0)),
    Case("short ones", (1, 2, 3), strategy="interleave"),
    Case("long rows", (40, 7), (9, 0), head_dim=64, v_head_dim=64),
)
# Whose cached keys are more than sockets hold at once.
AHEAD = Case("long prefixes", (9, 5), (700, 300), head_dim=64, v_head_dim=64)
STEP = Step("decode", (17, 3, 30), (1, 3, 1))
# What a round is about; all end with a gather of rows.
EXCHANGES = ("replicated", "shared", *SHARDED, "prefetch", "decode", "rows")
# Seconds that groups wait, where that is to end, and where not.
TIMEOUT, PATIENCE = 3.0, 60.0
# And where bytes are under way: gloo alone does not see there that a rank has died.
DEATH_TIMEOUT = 5.0
FAULTS = {
    "none": 2,
    "kill": 5,  # at one of its calls
    "kill in flight": 5,  # some microseconds later
    "stop": 3,  # and go on beyond the timeout
    "stop for a moment": 2,
    "stop and kill": 1,
    "late": 1,  # beyond the timeout
    "late for a moment": 1,
    "plan": 2,
    "arguments": 2,
    "memory": 4,
    "cut all cables": 3,
    "cut a cable": 2,
    "truncate": 2,
    "version": 2,
}
# Those that must be over, by the timeout of the group alone, or by what it takes to see them.
BY_TIMEOUT = ("stop", "late")
HARMLESS = ("none", "stop for a moment", "late for a moment")
AGREED = ("plan", "arguments", "version", "truncate")  # nobody is lost


@dataclass(frozen=True)
class Round:
    seed: int
    size: int
    transport: str  # "shm", "shm+tcp" or "tcp"
    exchange: str
    case: int
    repeats: int
    fault: str
    culprit: int
    event: int  # of the culprit's calls, at which it happens
    delay: float  # seconds: after that call, or of what lasts a moment

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.exchange} x {self.repeats} on {self.size} ranks by "
            f"{self.transport}, {self.batch.name}; {self.fault} of rank {self.culprit} at "
            f"call {self.event} + {self.delay * 1e6:.0f} us"
        )

    @property
    def batch(self) -> Case:
        """Batch that is attended to, but for decode steps."""
        return AHEAD if self.exchange == "prefetch" else CASES[self.case]

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host; by "shm+tcp" two hosts, of which the first has two ranks."""
        ranks = tuple(range(self.size))
        if self.transport != "shm+tcp":
            return (ranks,)
        return (ranks[:2], ranks[2:]) if self.seed % 2 else (ranks[::2], ranks[1::2])

    @property
    def timeout(self) -> float:
        """Timeout of the group: short where it is what ends the round."""
        if self.fault in BY_TIMEOUT:
            return TIMEOUT
        return DEATH_TIMEOUT if self.fault in DEATHS else PATIENCE

    @property
    def limit(self) -> float:
        """Seconds until every survivor must have its error."""
        if self.fault in BY_TIMEOUT:
            return self.timeout + 1
        if self.fault not in DEATHS or self.transport == "shm":
            return 1
        # A rank that shares its host knows of its end, and tells those of other hosts.
        alone = (self.culprit,) in self.hosts
        seen = self.transport == "shm+tcp" and not alone and not self.fault.startswith("cut")
        return 1 if seen else self.timeout + 1


DEATHS = ("kill", "kill in flight", "stop and kill", "cut all cables", "cut a cable")
TRANSPORTS = ("shm", "shm+tcp", "tcp")


def draw(
    seed: int, fault: str | None = None, exchange: str | None = None, transport: str | None = None
) -> Round:
    """The round of a seed, with another fault, exchange or transport if it is given."""
    dice = random.Random(seed)
    size = dice.randint(2, 4)
    one = Round(
        seed=seed,
        size=size,
        transport=dice.choice(("shm", "tcp")),
        exchange=dice.choice(EXCHANGES),
        case=dice.randrange(len(CASES)),
        repeats=dice.randint(1, 3),
        fault=dice.choices(list(FAULTS), list(FAULTS.values()))[0],
        culprit=dice.randrange(size),
        event=dice.choice((dice.randrange(6), dice.randrange(40))),
        delay=dice.choice((0, dice.random() * 2e-4, dice.random() * 5e-3)),
    )
    one = replace(one, fault=fault or one.fault, exchange=exchange or one.exchange)
    if one.fault == "truncate":
        one = replace(one, exchange="shared")
    if one.exchange == "shared" and one.transport == "tcp":
        one = replace(one, transport="shm")
    if one.transport == "shm" and size > 2 and dice.random() < 0.5:
        one = replace(one, transport="shm+tcp")
    if transport is not None:
        one = replace(one, transport=transport, size=max(size, 3))
    if one.fault.endswith("for a moment"):
        one = replace(one, delay=0.05 + one.delay)
    return one


# By transport; rows that are in flight are more than sockets hold.
KILLS = {
    "kill": ("shared", "ring", "replicated"),
    "kill in flight": ("pass_q", "all_to_all", "rows"),
    "stop and kill": ("gather", "prefetch", "decode"),
}


_TURNS = [(turn, name) for turn in range(3) for name in (FAULTS if turn < 2 else KILLS)]


def in_turns(number: int) -> Round:
    """Rounds of which 33 bring each fault by two transports, and a death to each exchange."""
    turn, name = _TURNS[number % len(_TURNS)]
    fault = list(FAULTS).index(name)
    transport = TRANSPORTS[(turn + fault) % len(TRANSPORTS)]
    exchange = EXCHANGES[(fault + 3 * turn) % len(EXCHANGES)]
    if name in KILLS:
        exchange = KILLS[name][turn]
    if transport == "tcp" and "shared" in (exchange, draw(number, name).exchange):
        transport = "shm"
    return replace(draw(number, name, exchange, transport), event=number % 4)
