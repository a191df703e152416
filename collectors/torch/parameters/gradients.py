"""Finds the parameters of each optimizer, in backward order, and the moments at which their gradients are read.

Gradients are read at the optimizer's step; if configured, also after each micro-step and before reduction.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from trainsentry.collectors.guard import Guard
from trainsentry.collectors.series import GRADIENT, Series
from trainsentry.collectors.settings import GRADIENTS, CollectSettings
from trainsentry.collectors.shared.model_graph import NamedModule
from trainsentry.collectors.targets import Selection
from trainsentry.collectors.torch.hooks.accumulation import AccumulationHooks
from trainsentry.collectors.torch.hooks.pre_reduction_gradients import MICRO_BATCH, RUNNING_SUM, PreReductionHooks
from trainsentry.collectors.torch.parameters.gradient_reader import GradientReader
from trainsentry.collectors.torch.parameters.readers import parameters_of
from trainsentry.collectors.torch.rows.local_tensor import local
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.sharding.local_shards import NamedParameter
from trainsentry.collectors.torch.sharding.model_names import ModelNames


class OptimizedParameters:
    """Finds the parameters of an optimizer that a part of the configuration selects.

    The first step fills `order` with each parameter's position in the backward pass.
    """

    def __init__(self, names: ModelNames, order: Mapping[nn.Parameter, int]) -> None:
        self.names = names
        self.order = order
        self._selections: Mapping[str, Selection] = {}
        self._lists: dict[tuple[str, int, int, int, int], list[NamedParameter]] = {}

    def choose(self, selections: Mapping[str, Selection]) -> None:
        """Set each part's selection."""
        self._selections = selections
        self._lists.clear()

    def selection(self, part: str) -> Selection:
        """Return the names that a part selects."""
        return self._selections[part]

    def selected(self, part: str, among: Iterable[NamedParameter] | None = None) -> list[NamedParameter]:
        """Return the parameters that a part selects, of all or of those in `among`."""
        chosen = self._selections[part].parameters
        return [p for p in (self.names.parameters if among is None else among) if p.name in chosen]

    def owned(self, part: str, optimizer: Optimizer) -> list[NamedParameter]:
        """Return the optimizer's parameters that `part` selects ("" for all), gradients' in backward order if known.

        The list is cached until the optimizer's groups or the order change.
        """
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        # A wrapper that steps the groups in turn gives its optimizer another flat parameter each time.
        first = _first_of(optimizer)
        key = (part, id(optimizer), size, len(self.order), first)
        found = self._lists.get(key)
        if found is None:
            names = self.names.by_parameter()
            owned = [named for p in parameters_of(optimizer) for named in names.get(p, ())]
            if part == GRADIENTS:
                owned.sort(key=lambda p: self.order.get(p.own, len(self.order)))
            found = self._lists[key] = self.selected(part, owned) if part else owned
        return found

    def unoptimized(self, part: str, optimizers: Sequence[Optimizer]) -> list[NamedParameter]:
        """Return the parameters that `part` selects and no optimizer updates."""
        owned = {p for optimizer in optimizers for p in parameters_of(optimizer)}
        return [p for p in self.selected(part) if p.owner is None and p.parameter not in owned]


def _first_of(optimizer: Optimizer) -> int:
    """Return the id of an optimizer's first parameter, 0 for none."""
    for group in optimizer.param_groups:  # a generator that is dropped half-way could swallow a Ctrl-C
        for parameter in group["params"]:
            return id(parameter)
    return 0


class GradientRows:
    """Appends the rows of gradients; `loss_scale()` divides those read during the backward pass.

    `order` maps each parameter to its position in the backward pass, after the first one.
    """

    def __init__(
        self,
        rows: StepRows,
        guard: Guard,
        settings: CollectSettings,
        loss_scale: Callable[[], Tensor | None],
        passed: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.rows = rows
        self.settings = settings
        self.loss_scale = loss_scale
        self.sampling = False
        self._reader = GradientReader(rows)
        self._as_they_arrive = settings.per_micro_step or settings.before_reduction
        self._accumulation = AccumulationHooks(guard, self._arrived if self._as_they_arrive else None, passed)
        self._pre_reduction = PreReductionHooks(guard, self._arrived_before_reduction)
        self.order: Mapping[nn.Parameter, int] = self._accumulation.order

    def adopt(self, settings: CollectSettings) -> None:
        """Follow other settings from the next step on."""
        self.settings = settings
        self._as_they_arrive = settings.per_micro_step or settings.before_reduction
        self._accumulation.arrived = self._arrived if self._as_they_arrive else None
        self._accumulation.detach()

    def learn_order(self, parameters: Sequence[NamedParameter]) -> None:
        """Hook the parameters until the next backward pass, to learn the order in which it reaches them."""
        self._accumulation.detach()
        self._accumulation.order.clear()
        self._accumulation.attach(parameters)

    def open_step(
        self, *, sampling: bool, selected: Callable[[], Sequence[NamedParameter]], modules: Sequence[NamedModule]
    ) -> None:
        """Begin a step; read the gradients of the `selected` parameters in it if `sampling`."""
        self.sampling = sampling
        if self._accumulation.attached and self._accumulation.order:
            self._accumulation.detach()
        if sampling and self._as_they_arrive and not self._accumulation.attached:
            self._accumulation.attach(selected())
        self._pre_reduction.detach()
        if sampling and self.settings.before_reduction:
            self._pre_reduction.attach(selected(), modules)

    def detach(self) -> None:
        """Remove every hook."""
        self._accumulation.detach()
        self._pre_reduction.detach()

    def read(self, parameters: Sequence[NamedParameter], grad_scale: Tensor | None, micro_step: int) -> None:
        """Read the gradients that an optimizer uses, divided by `grad_scale`; `micro_step` counts its updates."""
        if self.settings.per_micro_step:
            # The optimizer uses the last micro-step's running sum, after clipping: this row replaces the unclipped one.
            micro_steps = [self._accumulation.last_micro_step(named) for named in parameters]
            self._reader.read_fresh(list(zip(parameters, micro_steps, strict=True)), grad_scale)
        else:
            self._reader.read_taken(parameters, micro_step, grad_scale)

    def read_refused(self, parameters: Sequence[NamedParameter], gradients: Mapping[int, Tensor]) -> None:
        """Read the gradients that an optimizer freed without an update; `gradients` has them by parameter id."""
        known = [p for p in parameters if id(p.own) in gradients]
        self._reader.read_tensors(known, [gradients[id(p.own)] for p in known], self.loss_scale())

    def _arrived(self, named: NamedParameter, micro_step: int) -> None:
        if not self.sampling:
            return
        if self.settings.before_reduction and named.accumulates and named.own.grad is not None:
            series_id = self.rows.parameter_ids.id_before_reduction(named, micro_step, RUNNING_SUM)
            self.rows.add_many([series_id], [named.own.grad], self.loss_scale())
        if self.settings.per_micro_step and named.parameter.grad is not None:
            self._reader.read([(named, micro_step)], self.loss_scale())

    def _arrived_before_reduction(self, named: NamedParameter, micro_step: int, gradient: Tensor) -> None:
        series_id = self.rows.parameter_ids.id_before_reduction(named, micro_step, MICRO_BATCH)
        self.rows.add_many([series_id], [gradient], self.loss_scale())


def current_gradients(parameters: Sequence[NamedParameter]) -> list[tuple[Series, Tensor]]:
    """Return the gradients that parameters hold now, each this rank's part."""
    return [
        (Series(p.name, GRADIENT, module=p.module, vpp_stage=p.vpp_stage), p.part_of(local(p.parameter.grad)))
        for p in parameters
        if p.parameter.grad is not None
    ]
