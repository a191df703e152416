"""Defines the interface of a framework, which `torch/backend.py` and `mindspore/backend.py` implement.

Models, optimizers and tensors are the framework's own objects, so their type here is Any.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from trainsentry.collectors.capture import Replay, TensorCapture, TensorFiles
from trainsentry.collectors.fingerprint import FingerprintReader
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.series import Series, SeriesTable
from trainsentry.collectors.settings import CollectSettings, Plan
from trainsentry.collectors.shared.batch_rows import InputRows
from trainsentry.collectors.shared.host_rows import PendingRows
from trainsentry.collectors.shared.model_graph import DataFlow

# ---------------------------------------------------------------------- steps


class StepListener(Protocol):
    """Receives the events of the watched optimizers' steps. Its methods contain their own failures."""

    def before_optimizer(self, optimizer: Any, *, has_closure: bool) -> None:
        """An optimizer is about to update; with a closure it has not computed its gradients yet."""

    def after_optimizer(self, optimizer: Any) -> None:
        """An optimizer has updated its parameters."""

    def after_part(self, optimizer: Any) -> None:
        """An optimizer has updated some of its parameters; more may follow before `after_optimizer`."""

    def update_refused(self, optimizer: Any) -> None:
        """An optimizer found a non-finite value and did not update, although its loss scale is fixed."""

    def scaler_entered(self, scaler: Any, optimizer: Any) -> None:
        """A loss scaler is about to step or skip an optimizer."""

    def scaler_skipped(self, scaler: Any, optimizer: Any) -> None:
        """A loss scaler has decided not to call the optimizer."""

    def trained_without_step(self, passes: int) -> None:
        """No step has ended since `watch`, in so many backward passes."""


class NoListener:
    """A `StepListener` that ignores every report: it stands in until the step loop exists."""

    def before_optimizer(self, optimizer: Any, *, has_closure: bool) -> None:
        """Ignore it."""

    def after_optimizer(self, optimizer: Any) -> None:
        """Ignore it."""

    def after_part(self, optimizer: Any) -> None:
        """Ignore it."""

    def update_refused(self, optimizer: Any) -> None:
        """Ignore it."""

    def scaler_entered(self, scaler: Any, optimizer: Any) -> None:
        """Ignore it."""

    def scaler_skipped(self, scaler: Any, optimizer: Any) -> None:
        """Ignore it."""

    def trained_without_step(self, passes: int) -> None:
        """Ignore it."""


class OptimizerSteps(Protocol):
    """Hooks that report the begin and end of each optimizer's step to a `StepListener`."""

    listener: StepListener

    @property
    def optimizers(self) -> Sequence[Any]:
        """The optimizers whose steps are reported."""

    @property
    def adopted_only(self) -> bool:
        """Whether optimizers are watched, and all were taken over at their first step, none given to `watch`."""

    def ended_step(self) -> bool:
        """Whether the optimizers' own calls end the training step; read once a step."""

    def close(self) -> None:
        """Remove every hook."""


# ---------------------------------------------------------------------- ranks


class Store(Protocol):
    """Keeps texts that ranks write and read without waiting for each other's training."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def put(self, key: str, text: str) -> None:
        """Store a text."""

    def all(self, prefix: str) -> dict[int, str]:
        """Return the texts that ranks stored under `<prefix>/<rank>`, by rank."""


class Rendezvous(Protocol):
    """Connects all ranks of a run, watched or not. Only they know `secret`."""

    rank: int
    size: int
    secret: str

    @property
    def store(self) -> Store:
        """The texts that ranks store for each other."""

    @property
    def name(self) -> str:
        """The name of the framework's group that the monitor uses, "" where it uses none."""

    def exchange(self, mine: Any) -> list[Any]:
        """Return every rank's `mine`, in the order of ranks."""

    def close(self, *, broken: bool = False) -> None:
        """Leave; after a failed exchange (`broken`) wait for no other rank."""


class MaxReduce(Protocol):
    """Finds the element-wise maximum of the ranks' proposals, while their steps go on."""

    def propose(self, values: Sequence[float]) -> None:
        """Propose values; every rank proposes the same number of them."""

    def result(self) -> list[float] | None:
        """Return the maximum of each value, waiting for the other ranks; None when nothing was proposed.

        Raises:
            TimeoutError: when a rank does not propose in time, or has left.
            RuntimeError: when the ranks cannot be reached.

        """


# ---------------------------------------------------------------------- a watched model


class StepRows(Protocol):
    """The rows of the current step."""

    def __len__(self) -> int: ...

    def peek(self) -> PendingRows:
        """Return the rows so far, without removing them."""

    def drop(self) -> None:
        """Discard the rows."""


class ModelWatch(Protocol):
    """Reads a watched model around the steps of its optimizers.

    The order of calls: `add`, `listen`, then in each step `open_step`, `before_update` and `after_update` for each
    optimizer, `end_step`, `take`.
    """

    optimizers: list[Any]
    own_group: str
    in_window: bool

    @property
    def rows(self) -> StepRows:
        """The rows of the current step."""

    @property
    def flow(self) -> DataFlow:
        """The known edges between modules: which module's output is another's input."""

    @property
    def capture(self) -> TensorCapture:
        """Saves whole tensors of chosen modules."""

    def last_inputs(self, steps_back: int) -> list[InputRows]:
        """Return what is known of the rows of the model's inputs so many steps ago; empty where nothing is."""

    @property
    def on_host(self) -> bool:
        """Whether every parameter is in host memory, so that its values are read without waiting."""

    @property
    def saturates(self) -> bool:
        """Whether the device stores the largest finite value where a result overflows, instead of Inf."""

    @property
    def takes_boundaries(self) -> bool:
        """Whether only the optimizers' calls mark the ends of steps."""

    @property
    def adopted_only(self) -> bool:
        """Whether optimizers are watched, and all were taken over at their first step, none given to `watch`."""

    @property
    def step_has_ended(self) -> bool:
        """Whether the optimizers' calls have already ended the step; read once a step."""

    @property
    def expects_gradients(self) -> bool:
        """Whether this rank has parameters whose gradients the configuration selects."""

    @property
    def data_parallel(self) -> bool:
        """Whether each rank trains on its own data."""

    @property
    def seconds_waited(self) -> float | None:
        """Seconds that this step waited for collectives; None where they are not watched."""

    @property
    def first_pass_at(self) -> float | None:
        """When the step's first pass began, by `time.perf_counter`; None where it was not seen."""

    @property
    def micro_steps(self) -> int:
        """Micro-steps seen in this step; 0 where activations were not sampled."""

    @property
    def left_out(self) -> int:
        """Passes and calls not recorded, because they exceed the limits of a record."""

    def add(self, model: Any, optimizer: Any, grad_scaler: Any) -> None:
        """Check models and optimizers, and watch them.

        Raises:
            TypeError: for objects that are no models, optimizers or loss scalers of the framework.
            ValueError: for a model without parameters, a model already watched, an optimizer of another model, or a
                pattern that matches nothing.

        """

    def listen(self, listener: StepListener) -> None:
        """Report the optimizers' steps to a listener from now on, also those of models added later."""

    def adopt(self, settings: CollectSettings) -> None:
        """Read what other settings choose, from the next step on; a pattern that matches nothing is left out."""

    def watch_communication(self) -> None:
        """Watch collectives too, except those of the monitor's own group; once."""

    def replay(self) -> Replay | None:
        """Return a `Replay` of the last forward pass, None where the framework cannot replay."""

    def graph(self) -> dict[str, Any]:
        """Return the content of `graph.json`."""

    def open_step(self, plan: Plan) -> None:
        """Attach the hooks that the next step's plan needs."""

    def before_update(self, optimizer: Any, *, gradients_ready: bool = True) -> None:
        """Read gradients, parameters and optimizer state before an update."""

    def read_gradients(self, optimizer: Any) -> None:
        """Read the gradients that a closure has computed since `before_update`."""

    def after_update(self, optimizer: Any, *, gradients_ready: bool = False) -> None:
        """Read how an update changed the weights; also the gradients, where a closure computed them in the step."""

    def after_part(self, optimizer: Any) -> None:
        """Read how an update of some of an optimizer's parameters changed them."""

    def skipped(self, optimizer: Any) -> None:
        """Read a skipped step: everything that is read before an update, and no update."""

    def without_optimizer(self) -> None:
        """Read a step that ends without an optimizer's call."""

    def examine(self) -> None:
        """Read now every parameter and all optimizer state not yet read in this step, and what was switched."""

    def current_gradients(self) -> list[tuple[Series, Any]]:
        """Return the gradients that parameters hold now; empty where gradients are the optimizer's arguments."""

    def log(self, name: str, value: Any, micro_step: int) -> None:
        """Append a scalar."""

    def note_loss_scale(self, scaler: Any) -> None:
        """Append the scaler's current scale."""

    def take_call_order(self) -> int | None:
        """Return a hash of this step's sequence of collectives, equal on every rank; None when unknown."""

    def doing(self) -> dict[str, Any]:
        """Return the collective that this rank waits for, and the open ones; called from another thread."""

    def end_step(self) -> None:
        """Complete the rows of the step."""

    def take(self) -> PendingRows:
        """Remove and return the rows since the last call."""

    def stop_reading(self) -> None:
        """Remove every hook except those on the optimizers' steps."""

    def close(self) -> None:
        """Remove every hook and patch."""


# ---------------------------------------------------------------------- the framework


class Framework(Protocol):
    """A framework's `backend` module."""

    @property
    def saving(self) -> TensorFiles:
        """The module that saves tensors to files."""

    def new_watch(self, table: SeriesTable, guard: Guard, settings: CollectSettings) -> ModelWatch:
        """Return a watch without models."""

    def follow(self, model: Any, optimizer: Any, grad_scaler: Any, listener: StepListener) -> OptimizerSteps:
        """Report the optimizers' steps to a listener, on a rank that reads no tensors.

        Raises:
            TypeError, ValueError: as `ModelWatch.add` does.

        """

    def rank_and_world_size(self) -> tuple[int, int]:
        """Return this process's rank and the number of ranks."""

    def measure(self, table: SeriesTable, tensors: Sequence[tuple[Series, Any]], eps: float) -> PendingRows:
        """Return the statistics of tensors now, as rows of `table`; nothing is recorded."""

    def fingerprints(self, watch: Any) -> FingerprintReader | None:
        """Return a reader of the fingerprints of a watch's tensors, None where the framework has none."""

    def describe_environment(self) -> Mapping[str, Any]:
        """Return the framework, its version and the accelerator, for `run.json`."""

    def meet(self) -> Rendezvous | None:
        """Wait until every rank has joined; return None for a single rank, or where ranks cannot connect."""

    def max_reduce(self, rendezvous: Any, max_wait: float) -> MaxReduce:
        """Return a `MaxReduce` that waits at most `max_wait` seconds for other ranks."""
