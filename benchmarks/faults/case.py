"""What a case of the fault benchmark is: how a run is harmed, and what a correct alarm says."""

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

from families import PLACES


@dataclass(frozen=True)
class Expect:
    """A correct first suspect: patterns of names by family, quantities, kinds, and a rank where one is to blame.

    `within`: steps within which it is to be found; `hard`: no statistics are needed for it; `silent`: nothing may be
    reported. `any_rank`: with two ranks the one at fault cannot be told from the other. `suspects`: in the open list,
    instead of names and quantities, pairs of patterns (quantity, name), a place of `families.py` in braces.
    """

    quantities: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    rank: int | None = None
    hard: bool = False
    within: int = 20
    silent: bool = False
    suspects: tuple[tuple[str, str], ...] = ()

    def is_right(self, suspect: dict[str, Any], family: str) -> bool:
        """Whether a suspect is the culprit: rank, quantity and name."""
        if self.rank is not None and suspect["rank"] != self.rank:
            return False
        if self.suspects:
            return any(
                fnmatch(suspect["quantity"], quantity) and fnmatch(suspect["name"], name.format(**PLACES[family]))
                for quantity, name in self.suspects
            )
        names = self.names.get(family, self.names.get("", ("*",)))
        return suspect["quantity"] in self.quantities and any(fnmatch(suspect["name"], n) for n in names)


def _nothing(*_: Any) -> None:
    return None


@dataclass(frozen=True)
class Case:
    """One fault or control. Its functions take the run; `loss` takes the loss too and returns the one to use.

    `build`: after the model was made; `before_step`, `before_update`, `after_update`: in the step; `batch` takes and
    returns inputs and targets; `config`: what the monitor is told beyond the benchmark's own settings.

    The open list only. `source`: the public report of such a failure; `group`: its family of faults, the name of its
    file; `prepare`: as `build`, but done in the twin without the fault too; `resume`: the run is saved and resumed in a
    new model at the step of the fault, and this changes what is loaded; `optimizers`: those of the list if none.
    """

    id: str
    title: str
    expect: Expect
    families: tuple[str, ...] = ("gpt", "cnn")
    ranks: int = 1
    build: Callable[[Any], None] = _nothing
    before_step: Callable[[Any], None] = _nothing
    batch: Callable[[Any, Any, Any], Any] | None = None
    loss: Callable[[Any, Any], Any] | None = None
    before_update: Callable[[Any], None] = _nothing
    after_update: Callable[[Any], None] = _nothing
    config: dict[str, Any] = field(default_factory=dict)
    from_start: bool = False
    steps: int | None = None
    source: str = ""
    group: str = ""
    prepare: Callable[[Any], None] = _nothing
    resume: Callable[[Any, dict[str, Any]], None] | None = None
    optimizers: tuple[str, ...] = ()
