# SPDX-License-Identifier: Apache-2.0
"""Rounds of random faults, each drawn from its seed alone: the calls of ranks, the fault, and the
time until ranks must report it."""

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
# A case whose cached keys are more than sockets hold at once.
AHEAD = Case("long prefixes", (9, 5), (700, 300), head_dim=64, v_head_dim=64)
STEP = Step("decode", (17, 3, 30), (1, 3, 1))
# Main calls of a round; all rounds end with a gather of rows.
EXCHANGES = ("replicated", "shared", *SHARDED, "prefetch", "decode", "rows")
# Timeouts of groups in seconds, if the timeout shall end the round, and if not.
TIMEOUT, PATIENCE = 3.0, 60.0
# Timeout if a rank dies: gloo alone does not notice that while bytes are in flight.
DEATH_TIMEOUT = 5.0
FAULTS = {
    "none": 2,
    "kill": 5,  # the culprit dies at one of its calls
    "kill in flight": 5,  # some microseconds later
    "stop": 3,  # continues beyond the timeout
    "stop for a moment": 2,
    "stop and kill": 1,
    "late": 1,  # it lasts longer than the timeout
    "late for a moment": 1,
    "plan": 2,
    "arguments": 2,
    "memory": 4,
    "cut all cables": 3,
    "cut a cable": 2,
    "truncate": 2,
    "version": 2,
}
# Faults that only the timeout of the group ends.
BY_TIMEOUT = ("stop", "late")
HARMLESS = ("none", "stop for a moment", "late for a moment")
AGREED = ("plan", "arguments", "version", "truncate")  # no rank is lost


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
    event: int  # number of the culprit's call at which the fault comes
    delay: float  # seconds after that call; or duration of a fault "for a moment"

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.exchange} x {self.repeats} on {self.size} ranks by "
            f"{self.transport}, {self.batch.name}; {self.fault} of rank {self.culprit} at "
            f"call {self.event} + {self.delay * 1e6:.0f} us"
        )

    @property
    def batch(self) -> Case:
        """Batch of the round, except in decode steps."""
        return AHEAD if self.exchange == "prefetch" else CASES[self.case]

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each host; "shm+tcp" has two hosts, the first with two ranks."""
        ranks = tuple(range(self.size))
        if self.transport != "shm+tcp":
            return (ranks,)
        return (ranks[:2], ranks[2:]) if self.seed % 2 else (ranks[::2], ranks[1::2])

    @property
    def timeout(self) -> float:
        """Timeout of the group, which is short if it ends the round."""
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
        # Ranks that share the culprit's host see its end, and tell ranks of other hosts.
        alone = (self.culprit,) in self.hosts
        seen = self.transport == "shm+tcp" and not alone and not self.fault.startswith("cut")
        return 1 if seen else self.timeout + 1


DEATHS = ("kill", "kill in flight", "stop and kill", "cut all cables", "cut a cable")
TRANSPORTS = ("shm", "shm+tcp", "tcp")


def draw(
    seed: int, fault: str | None = None, exchange: str | None = None, transport: str | None = None
) -> Round:
    """Return the round of a seed, with the fault, exchange or transport if one is given."""
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


# Exchanges for deaths, one for each transport; rows in flight are more than sockets hold.
KILLS = {
    "kill": ("shared", "ring", "replicated"),
    "kill in flight": ("pass_q", "all_to_all", "rows"),
    "stop and kill": ("gather", "prefetch", "decode"),
}


_TURNS = [(turn, name) for turn in range(3) for name in (FAULTS if turn < 2 else KILLS)]


def in_turns(number: int) -> Round:
    """Return round `number` of 33: each fault is on two transports, a death in each exchange."""
    turn, name = _TURNS[number % len(_TURNS)]
    fault = list(FAULTS).index(name)
    transport = TRANSPORTS[(turn + fault) % len(TRANSPORTS)]
    exchange = EXCHANGES[(fault + 3 * turn) % len(EXCHANGES)]
    if name in KILLS:
        exchange = KILLS[name][turn]
    if transport == "tcp" and "shared" in (exchange, draw(number, name).exchange):
        transport = "shm"
    return replace(draw(number, name, exchange, transport), event=number % 4)
