"""When gradients are read: at the optimizer's step; after each micro-step and before reduction too, where asked for."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from trainsentry.collectors.guard import Guard
from trainsentry.collectors.settings import CollectSettings
from trainsentry.collectors.shared.model_graph import NamedModule
from trainsentry.collectors.torch.hooks.accumulation import AccumulationHooks
from trainsentry.collectors.torch.hooks.pre_reduction_gradients import (
    MICRO_BATCH,
    RUNNING_SUM,
    PreReductionHooks,
)
from trainsentry.collectors.torch.parameters.readers import GradientReader, ParameterSeries
from trainsentry.collectors.torch.sharding.local_shards import NamedParameter


class GradientRows:
    """Appends the rows of gradients; those that arrive in the backward pass are divided by `loss_scale()`.

    `order` holds each parameter's place in the backward pass, once the first one has run.
    """

    def __init__(
        self,
        series: ParameterSeries,
        guard: Guard,
        settings: CollectSettings,
        loss_scale: Callable[[], Tensor | None],
    ) -> None:
        self.series = series
        self.settings = settings
        self.loss_scale = loss_scale
        self.sampling = False
        self._reader = GradientReader(series)
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
            series_id = self.series.id_of_unreduced(named, micro_step, RUNNING_SUM)
            self.series.rows.add_many([series_id], [named.parameter.grad], self.loss_scale())
        if self.settings.per_micro_step:
            self._reader.read([(named, micro_step)], self.loss_scale())

    def _unreduced_arrived(self, named: NamedParameter, micro_step: int, gradient: Tensor) -> None:
        series_id = self.series.id_of_unreduced(named, micro_step, MICRO_BATCH)
        self.series.rows.add_many([series_id], [gradient], self.loss_scale())
