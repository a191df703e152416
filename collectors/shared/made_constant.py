"""Finds the parameters that a module of the model's own has made without a gradient: constants, not frozen weights."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from trainsentry.collectors.series import UNWRITTEN, Series
from trainsentry.collectors.shared.model_graph import NamedModule

FEW_CONSTANT: Final = 0.1
"""Largest share of parameters without a gradient from the start that are told one by one: more are a frozen base."""


Named = Any
"""A framework's parameter with its `name`, the name of its `module`, and its `vpp_stage`."""


def made_constant(
    parameters: Sequence[Named],
    modules: Iterable[NamedModule],
    is_constant: Callable[[Named], bool],
    is_layer: Callable[[Any], bool],
) -> list[Series]:
    """Return the series, `unwritten.<parameter>`, of each constant that belongs to no layer of the framework's own.

    Who writes a module of their own may mean a constant by it, as a table of sines; a layer that the framework supplies
    learns all it has, so one that does not was frozen. `is_constant` is given a parameter, `is_layer` a module.
    """
    layers = {(m.name, m.vpp_stage) for m in modules if is_layer(m.module)}
    constant = [p for p in parameters if is_constant(p) and (p.module, p.vpp_stage) not in layers]
    if len(constant) > FEW_CONSTANT * len(parameters):
        return []
    names = [(f"{UNWRITTEN}.{p.name}", p.module) for p in constant]
    return [Series(name, name, module=module, scalar=True) for name, module in names]
