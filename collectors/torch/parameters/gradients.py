"""Gradients: which parameters an optimizer moves, in backward order, and when their gradients are read.

They are read at the optimizer's step; after each micro-step and before reduction too, where the configuration asks.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from trainsentry.collectors.guard import Guard
from trainsentry.collectors.series import GRADIENT
from trainsentry.collectors.settings import GRADIENTS, CollectSettings
from trainsentry.collectors.shared.model_graph import NamedModule
from trainsentry.collectors.targets import Selection
from trainsentry.collectors.torch.hooks.accumulation import AccumulationHooks
from trainsentry.collectors.torch.hooks.pre_reduction_gradients import MICRO_BATCH, RUNNING_SUM, PreReductionHooks
from trainsentry.collectors.torch.parameters.readers import parameters_of
from trainsentry.collectors.torch.rows.local_tensor import version_of
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.sharding.local_shards import NamedParameter
from trainsentry.collectors.torch.sharding.model_names import ModelNames


class OptimizedParameters:
    """Finds the parameters of an optimizer that a part of the configuration selects.

    `order` is filled, while the first step runs, with each parameter's place in the backward pass.
    """

    def __init__(self, names: ModelNames, order: Mapping[nn.Parameter, int]) -> None:
        self.names = names
        self.order = order
        self._selections: Mapping[str, Selection] = {}
        self._lists: dict[tuple[str, int, int, int, int], list[NamedParameter]] = {}

    def choose(self, selections: Mapping[str, Selection]) -> None:
        """Take what each part selects."""
        self._selections = selections
        self._lists.clear()

    def selected(self, part: str, among: Iterable[NamedParameter] | None = None) -> list[NamedParameter]:
        """Return the parameters that a part selects, of all or of some."""
        chosen = self._selections[part].parameters
        return [p for p in (self.names.parameters if among is None else among) if p.name in chosen]

    def owned(self, part: str, optimizer: Optimizer) -> list[NamedParameter]:
        """Return the optimizer's parameters that `part` selects, in backward order once that is known; "" for all.

        The list is made anew only when the optimizer's groups or the known order have changed.
        """
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        # A wrapper that steps one group after the other shows its optimizer another flat parameter each time.
        first = id(next(parameters_of(optimizer), None))
        key = (part, id(optimizer), size, len(self.order), first)
        found = self._lists.get(key)
        if found is None:
            names = self.names.by_parameter()
            owned = [named for p in parameters_of(optimizer) for named in names.get(p, ())]
            if part == GRADIENTS:
                owned.sort(key=lambda p: self.order.get(p.own, len(self.order)))
            found = self._lists[key] = self.selected(part, owned) if part else owned
        return found

    def nobodys(self, part: str, optimizers: Sequence[Optimizer]) -> list[NamedParameter]:
        """Return the parameters that `part` selects and no optimizer moves."""
        owned = {p for optimizer in optimizers for p in parameters_of(optimizer)}
        return [p for p in self.selected(part) if p.owner is None and p.parameter not in owned]


class GradientReader:
    """Reads gradients; one that nothing has touched since an optimizer last took it is stale and gives no row."""

    def __init__(self, rows: StepRows) -> None:
        self.rows = rows
        self._last: dict[int, tuple[weakref.ref[Tensor], int | None]] = {}  # by id: a tensor's own hash is slow

    def read(self, parameters: Sequence[tuple[NamedParameter, int]], grad_scale: Tensor | None) -> None:
        """Append a row for each (parameter, micro-step): its gradient divided by `grad_scale` where still scaled."""
        ids, owners, gradients = [], [], []
        for named, micro_step in parameters:
            gradient = named.parameter.grad
            if gradient is not None:
                ids.append(self.rows.parameter_ids.id_of(named, GRADIENT, micro_step))
                owners.append(named)
                gradients.append(gradient)
        self.rows.add_parameters(ids, owners, gradients, grad_scale)

    def read_tensors(
        self, parameters: Sequence[NamedParameter], gradients: Sequence[Tensor], grad_scale: Tensor | None
    ) -> None:
        """Append a row for each parameter's part of its gradient, given as a tensor of its own."""
        ids = [self.rows.parameter_ids.id_of(named, GRADIENT) for named in parameters]
        parts = [
            x.detach().reshape(-1)[: p.fragment.numel] if p.fragment is not None else x
            for p, x in zip(parameters, gradients, strict=True)
        ]
        self.rows.add_many(ids, parts, grad_scale, layouts=self.rows.layouts_of(parameters))

    def read_taken(self, parameters: Sequence[tuple[NamedParameter, int]], grad_scale: Tensor | None) -> None:
        """Append a row for each gradient that an optimizer takes, unless it is the one taken last."""
        fresh: dict[int, bool] = {}  # a flat parameter holds many
        for named, _ in parameters:
            if id(named.parameter) not in fresh:
                fresh[id(named.parameter)] = self._is_fresh(named.parameter)
        self.read([(named, turn) for named, turn in parameters if fresh[id(named.parameter)]], grad_scale)

    def _is_fresh(self, parameter: nn.Parameter) -> bool:
        gradient = parameter.grad
        if gradient is None:
            return False
        version = version_of(gradient)
        last = self._last.get(id(parameter))
        if last is not None and version is not None and last[1] == version and last[0]() is gradient:
            return False
        self._last[id(parameter)] = (weakref.ref(gradient), version)
        return True


class GradientRows:
    """Appends the rows of gradients; those that arrive in the backward pass are divided by `loss_scale()`.

    `order` holds each parameter's place in the backward pass, once the first one has run.
    """

    def __init__(
        self,
        rows: StepRows,
        guard: Guard,
        settings: CollectSettings,
        loss_scale: Callable[[], Tensor | None],
    ) -> None:
        self.rows = rows
        self.settings = settings
        self.loss_scale = loss_scale
        self.sampling = False
        self._reader = GradientReader(rows)
        self._as_they_arrive = settings.per_micro_step or settings.before_reduction
        self._accumulation = AccumulationHooks(guard, self._arrived if self._as_they_arrive else None)
        self._unreduced = PreReductionHooks(guard, self._unreduced_arrived)
        self.order: Mapping[nn.Parameter, int] = self._accumulation.order

    def learn_order(self, parameters: Sequence[NamedParameter]) -> None:
        """Hook the parameters once, to learn the order in which the backward pass reaches them."""
        self._accumulation.detach()
        self._accumulation.order.clear()
        self._accumulation.attach(parameters)

    def open_step(
        self, *, sampling: bool, selected: Callable[[], Sequence[NamedParameter]], modules: Sequence[NamedModule]
    ) -> None:
        """Begin a step: read the gradients of the `selected` parameters in it or not."""
        self.sampling = sampling
        if self._accumulation.attached and self._accumulation.order:
            self._accumulation.detach()
        if sampling and self._as_they_arrive and not self._accumulation.attached:
            self._accumulation.attach(selected())
        self._unreduced.detach()
        if sampling and self.settings.before_reduction:
            self._unreduced.attach(selected(), modules)

    def detach(self) -> None:
        """Remove every hook."""
        self._accumulation.detach()
        self._unreduced.detach()

    def read(self, parameters: Sequence[NamedParameter], grad_scale: Tensor | None, turn: int) -> None:
        """Read what an optimizer takes, in its `turn`-th update of the step, divided by `grad_scale`."""
        if self.settings.per_micro_step:
            # What the optimizer takes is the last micro-step's running sum, after clipping: it replaces that row.
            turns = [(named, self._accumulation.last_micro_step(named)) for named in parameters]
        else:
            turns = [(named, turn) for named in parameters]
        self._reader.read_taken(turns, grad_scale)

    def read_refused(self, parameters: Sequence[NamedParameter], gradients: Mapping[int, Tensor]) -> None:
        """Read the gradients that an optimizer freed without an update, by their parameters' ids."""
        held = [p for p in parameters if id(p.own) in gradients]
        self._reader.read_tensors(held, [gradients[id(p.own)] for p in held], self.loss_scale())

    def _arrived(self, named: NamedParameter, micro_step: int) -> None:
        if not self.sampling or named.parameter.grad is None:
            return
        if self.settings.before_reduction and named.sharding is None:
            series_id = self.rows.parameter_ids.id_of_unreduced(named, micro_step, RUNNING_SUM)
            self.rows.add_many([series_id], [named.parameter.grad], self.loss_scale())
        if self.settings.per_micro_step:
            self._reader.read([(named, micro_step)], self.loss_scale())

    def _unreduced_arrived(self, named: NamedParameter, micro_step: int, gradient: Tensor) -> None:
        series_id = self.rows.parameter_ids.id_of_unreduced(named, micro_step, MICRO_BATCH)
        self.rows.add_many([series_id], [gradient], self.loss_scale())
