"""Decisions that all ranks take together, at step boundaries that the step number alone determines."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from trainsentry.collectors.backend import MaxReduce, Rendezvous
from trainsentry.collectors.guard import Guard
from trainsentry.monitor.errors import OverflowLimitReached, TrainingStopped
from trainsentry.monitor.ranks.hang_watch import HangWatch
from trainsentry.monitor.schedule import Schedule

PART: Final = "agreement of the ranks"

AT_LEAST_EVERY: Final = 10
"""Most steps between two exchanges, and so the longest delay of a stop."""

MANY_RANKS: Final = 64
"""With at least this many ranks, an answer is taken after `LAG` steps: a ring of 4,096 ranks takes 0.4 s where a
message takes 50 µs."""

LAG: Final = 5
"""Steps from an exchange to its answer with many ranks; exchanges are then `AT_LEAST_EVERY` steps apart."""

NO_STOP, STOP, OVERFLOW_STOP = 0, 1, 2


@dataclass(frozen=True)
class Proposal:
    """One rank's proposal, or the ranks' agreement: the element-wise maximum of all proposals.

    `dense_until` is the step before which everything is sampled. `minus_settled` is minus the number of settled
    incidents that a rank has received, so that the maximum counts the incidents that every rank has received. `costs`
    are the numbers of the overhead budget. `max_step` is the step number and `minus_min_step` is minus it: unless they
    add up to 0, the ranks are at different steps. `commands` is the number of commands that the reading rank has read.
    """

    stop: int = NO_STOP
    dense_until: int = 0
    minus_settled: int = -(2**40)
    costs: tuple[float, ...] = ()
    max_step: int = 0
    minus_min_step: int = 0
    commands: int = 0

    def numbers(self, width: int) -> list[float]:
        """Return the proposal as numbers, the last `width` of them costs: the same length on every rank."""
        costs = [*self.costs, *[float("-inf")] * width][:width]  # gloo ends a process whose message has another size
        return [
            *map(float, (self.stop, self.dense_until, self.minus_settled, self.max_step, self.minus_min_step)),
            float(self.commands),
            *costs,
        ]

    @classmethod
    def of(cls, numbers: list[float]) -> "Proposal":
        """Rebuild a proposal from its numbers."""
        stop, dense_until, minus_settled, max_step, minus_min_step, commands = map(int, numbers[:6])
        return cls(stop, dense_until, minus_settled, tuple(numbers[6:]), max_step, minus_min_step, commands)


class Consensus:
    """Exchanges proposals at one boundary and takes the answer at a later one, so that no rank waits for another.

    A single rank (`rendezvous` is None) decides at once. A rank that is not watched, or whose monitor has failed, still
    takes part, with empty proposals. After a missing answer, this rank stops taking part.
    """

    def __init__(
        self,
        rendezvous: Rendezvous | None,
        max_reduce: MaxReduce | None,
        schedule: Schedule,
        guard: Guard,
        *,
        costs: int,
    ) -> None:
        self.rendezvous = rendezvous
        self.max_reduce = max_reduce
        self.schedule = schedule
        self.guard = guard
        self.hangs: HangWatch | None = None
        self._costs = costs
        self._many = rendezvous is not None and rendezvous.size >= MANY_RANKS
        self._every = AT_LEAST_EVERY if self._many else min([AT_LEAST_EVERY, *schedule.every.values()])
        self._proposed_at: int | None = None
        self._commands = 0

    @classmethod
    def of_single_rank(cls, schedule: Schedule, guard: Guard) -> "Consensus":
        """Return the consensus of a single rank."""
        return cls(None, None, schedule, guard, costs=0)

    @property
    def is_single_rank(self) -> bool:
        """Whether there is a single rank, which decides at once."""
        return self.rendezvous is None

    @property
    def delay(self) -> int:
        """Steps from a proposal to its answer, with up to `MANY_RANKS` ranks."""
        return 0 if self.is_single_rank else 1

    def at_boundary(self, step: int, proposal: Proposal) -> Proposal | None:
        """Return the answer that is due at the end of `step`, if there is one, and exchange proposals if it is time."""
        if self.is_single_rank:
            self._sample_densely(step + 1, proposal.dense_until)
            return proposal
        agreed: Proposal | None = None
        if self._answer_is_due(step):
            self._proposed_at = None
            agreed = self.guard.run(PART, self._result)
        if self.hangs is not None:
            self.hangs.step_ended()
        if agreed is not None and agreed.max_step <= step:  # else it was proposed before a rollback
            self._sample_densely(step + 1, agreed.dense_until)
        if self.max_reduce is not None and self.exchanges(step):
            proposal = replace(proposal, max_step=step, minus_min_step=-step)
            self.guard.run(PART, self.max_reduce.propose, proposal.numbers(self._costs))
            self._proposed_at = step
        if agreed is not None and agreed.max_step != -agreed.minus_min_step:
            self.guard.warn_once(
                "steps of the ranks",
                f"the ranks count steps differently: one ends step {-agreed.minus_min_step} while another ends step "
                f"{agreed.max_step}. Statistics over all ranks may combine different steps.",
            )
        return agreed

    def exchanges(self, step: int) -> bool:
        """Whether proposals are exchanged at the end of `step`.

        This depends on the step number and earlier agreements only. With its own sampling, which a failure may have
        changed, a rank could leave the others waiting.
        """
        return step % self._every == 0 or (not self._many and step in self.schedule.dense)

    def _answer_is_due(self, step: int) -> bool:
        return self._proposed_at is not None and step - self._proposed_at >= (LAG if self._many else 1)

    def _sample_densely(self, step: int, until: int) -> None:
        """Sample every step before `until`; done here, so that it happens even if the rest of the monitor failed."""
        if until > step:
            self.schedule.sample_every_step(step, until - step)

    def _result(self) -> Proposal | None:
        numbers = None if self.max_reduce is None else self.max_reduce.result()
        return Proposal.of(numbers) if numbers is not None else None

    def commands(self, agreed: Proposal | None, read: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the commands that every rank carries out now; `read` are those that this rank has read so far."""
        if agreed is None or agreed.commands <= self._commands:
            return []
        new = list(read[self._commands : agreed.commands])
        self._commands = agreed.commands
        if self.rendezvous is None:
            return new
        found = self.guard.run(PART, self.rendezvous.exchange, new) or [new]
        return next((commands for commands in found if isinstance(commands, list) and commands), [])

    def stop_after(self, step: int, agreed: Proposal | None, request: TrainingStopped | None) -> TrainingStopped | None:
        """Return the stop that every rank raises at the end of `step`; `request` is this rank's."""
        if self.rendezvous is None:
            return request
        stops = agreed is not None and agreed.stop
        return self._stop_of_all(self.rendezvous, step, request) if stops else None

    def _stop_of_all(self, rendezvous: Rendezvous, step: int, request: TrainingStopped | None) -> TrainingStopped:
        """Return the stop of the lowest rank that requested one."""
        mine = None if request is None else (isinstance(request, OverflowLimitReached), request.reason)
        found = self.guard.run(PART, rendezvous.exchange, mine) or [mine]
        requests = [(rank, *r) for rank, r in enumerate(found) if isinstance(r, list | tuple) and len(r) == 2]
        here = rendezvous.rank
        rank, overflow, reason = requests[0] if requests else (here, False, "another rank requested a stop")
        kind = OverflowLimitReached if overflow else TrainingStopped
        where = "" if rank == here else f"rank {rank}: "
        return kind(step, f"{where}{reason}", request.incident if request is not None else None)

    @property
    def broken(self) -> bool:
        """Whether an exchange has failed."""
        return PART in self.guard.disabled

    def close(self) -> None:
        """Wait for the last answer, as the other ranks do."""
        if self.max_reduce is not None:
            self.guard.run(PART, self.max_reduce.result)


def kind_of(stop: TrainingStopped | None) -> int:
    """Return the number that stands for a stop in a proposal."""
    if stop is None:
        return NO_STOP
    return OVERFLOW_STOP if isinstance(stop, OverflowLimitReached) else STOP
