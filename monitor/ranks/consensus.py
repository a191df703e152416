"""What all ranks decide together, at boundaries that the step's number alone determines."""

from dataclasses import dataclass, replace
from typing import Final

from trainsentry.collectors.backend import MaxReduce, Rendezvous
from trainsentry.collectors.guard import Guard
from trainsentry.monitor.errors import OverflowLimitReached, TrainingStopped
from trainsentry.monitor.ranks.hang_watch import HangWatch
from trainsentry.monitor.schedule import Schedule

PART: Final = "agreement of the ranks"

AT_LEAST_EVERY: Final = 10
"""Steps between two exchanges where nothing is sampled in between: how late a stop can come."""

MANY_RANKS: Final = 64
"""Ranks from which on an exchange is given `LAG` steps: a ring of 4,096 takes 0.4 s where a message takes 50 µs."""

LAG: Final = 5
"""Steps after which the answer is taken where there are many ranks; exchanges are then `AT_LEAST_EVERY` steps apart."""

NO_STOP, STOP, OVERFLOW_STOP = 0, 1, 2


@dataclass(frozen=True)
class Proposal:
    """What one rank would like, or what all have agreed on: of everything the greatest counts.

    `ahead` and `behind` are the step's number and minus it: they tell whether all ranks are at one step. `dense_until`
    is the step up to which everything is to be sampled; `unheard` is minus the number of settled incidents that the
    rank has heard of, so that all act on one only when the last has heard of it. `costs` are the overhead budget's
    numbers.
    """

    stop: int = NO_STOP
    dense_until: int = 0
    unheard: int = -(2**40)
    costs: tuple[float, ...] = ()
    ahead: int = 0
    behind: int = 0

    def numbers(self, width: int) -> list[float]:
        """Return the wishes as numbers, of which `width` are costs: as many on every rank, whatever it wishes."""
        costs = [*self.costs, *[float("-inf")] * width][:width]  # gloo ends a process whose message has another size
        return [*map(float, (self.stop, self.dense_until, self.unheard, self.ahead, self.behind)), *costs]

    @classmethod
    def of(cls, numbers: list[float]) -> "Proposal":
        """Rebuild wishes from numbers."""
        stop, dense_until, unheard, ahead, behind = map(int, numbers[:5])
        return cls(stop, dense_until, unheard, tuple(numbers[5:]), ahead, behind)


class Consensus:
    """Exchanges wishes at one boundary and has the answer at a later one; between them a step's time passes.

    A rank whose own monitor has failed, or that is not watched, goes on taking part. Once an answer fails to come,
    this rank takes no more part, and no more common decisions are taken.
    """

    def __init__(
        self, rendezvous: Rendezvous, max_reduce: MaxReduce, schedule: Schedule, guard: Guard, *, costs: int
    ) -> None:
        self.rendezvous = rendezvous
        self.max_reduce = max_reduce
        self.schedule = schedule
        self.guard = guard
        self.rank = rendezvous.rank
        self.hangs: HangWatch | None = None
        self._costs = costs
        self._many = rendezvous.size >= MANY_RANKS
        self._every = AT_LEAST_EVERY if self._many else min([AT_LEAST_EVERY, *schedule.every.values()])
        self._proposed_at: int | None = None

    def exchanges(self, step: int) -> bool:
        """Whether wishes are exchanged at the end of `step`.

        That follows from the step's number and from what was agreed on: a rank that went by its own sampling, which a
        failure may have changed, would leave the others waiting.
        """
        return step % self._every == 0 or (not self._many and step in self.schedule.dense)

    def _answer_is_due(self, step: int) -> bool:
        return self._proposed_at is not None and step - self._proposed_at >= (LAG if self._many else 1)

    def at_boundary(self, step: int, proposal: Proposal) -> Proposal | None:
        """Return what was agreed on since the last boundary, and tell the others this rank's wishes."""
        agreed: Proposal | None = None
        if self._answer_is_due(step):
            self._proposed_at = None
            agreed = self.guard.run(PART, self._result)
        if self.hangs is not None:
            self.hangs.step_ended()
        if agreed is not None and agreed.ahead <= step:  # else asked for before a rollback
            self._sample_densely(step + 1, agreed.dense_until)
        if self.exchanges(step):
            proposal = replace(proposal, ahead=step, behind=-step)
            self.guard.run(PART, self.max_reduce.propose, proposal.numbers(self._costs))
            self._proposed_at = step
        if agreed is not None and agreed.ahead != -agreed.behind:
            self.guard.warn_once(
                "steps of the ranks",
                f"the ranks count steps differently: one ends step {-agreed.behind} as another ends step "
                f"{agreed.ahead}. Statistics of whole tensors and sampling may not fit together.",
            )
        return agreed

    @property
    def broken(self) -> bool:
        """Whether an exchange has failed."""
        return PART in self.guard.disabled

    def _sample_densely(self, step: int, until: int) -> None:
        """Sample as all have agreed on, here, where it happens whatever else of the monitor has failed."""
        if until > step:
            self.schedule.sample_every_step(step, until - step)

    def _result(self) -> Proposal | None:
        numbers = self.max_reduce.result()
        return Proposal.of(numbers) if numbers is not None else None

    def close(self) -> None:
        """Take the last answer, for which the others wait as well."""
        self.guard.run(PART, self.max_reduce.result)

    def stop_together(self, step: int, own: TrainingStopped | None) -> TrainingStopped:
        """Return the stop that all ranks raise, once they have agreed to: the lowest rank's that asked for one."""
        mine = None if own is None else (isinstance(own, OverflowLimitReached), own.reason)
        told = self.guard.run(PART, self.rendezvous.exchange, mine) or [mine]
        asked = [(rank, *said) for rank, said in enumerate(told) if isinstance(said, list | tuple) and len(said) == 2]
        rank, overflow, reason = asked[0] if asked else (self.rank, False, "another rank asked for a stop")
        kind = OverflowLimitReached if overflow else TrainingStopped
        where = "" if rank == self.rank else f"rank {rank}: "
        return kind(step, f"{where}{reason}", own.incident if own is not None else None)


def kind_of(stop: TrainingStopped | None) -> int:
    """Return the number by which the ranks tell each other of a stop."""
    if stop is None:
        return NO_STOP
    return OVERFLOW_STOP if isinstance(stop, OverflowLimitReached) else STOP
