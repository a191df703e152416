"""Names of modules and parameters of everything that is watched."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from trainsentry.collectors.named_module import NamedModule
from trainsentry.collectors.torch.clean_names import CleanNames
from trainsentry.collectors.torch.deepspeed_partitions import wrappers_of
from trainsentry.collectors.torch.held_parameters import parameters_of_chunk
from trainsentry.collectors.torch.named import NamedParameter


@dataclass
class ModelNames:
    """Every module and parameter of the watched model chunks, in registration order; shared ones once."""

    modules: list[NamedModule] = field(default_factory=list)
    parameters: list[NamedParameter] = field(default_factory=list)
    chunks: list[nn.Module] = field(default_factory=list)

    def add(self, chunks: Sequence[nn.Module], optimizers: Iterable[Any] = ()) -> None:
        """Add model chunks; a list of several numbers them as virtual pipeline stages.

        `optimizers` may be among those of DeepSpeed's, in whose partitions the parameters lie.
        """
        wrappers = wrappers_of(chunks, optimizers)
        for stage, chunk in enumerate(chunks):
            names = CleanNames(chunk)
            self.modules.extend(_modules(chunk, stage, names))
            self.parameters.extend(parameters_of_chunk(chunk, stage, names, wrappers))
            self.chunks.append(chunk)

    def copy(self) -> "ModelNames":
        """Return a copy that can be added to."""
        return ModelNames(list(self.modules), list(self.parameters), list(self.chunks))

    def by_parameter(self) -> dict[nn.Parameter, list[NamedParameter]]:
        """Map each parameter object to those that it holds."""
        found: dict[nn.Parameter, list[NamedParameter]] = {}
        for named in self.parameters:
            found.setdefault(named.parameter, []).append(named)
        return found


def _modules(chunk: nn.Module, stage: int, names: CleanNames) -> Iterator[NamedModule]:
    for raw, module in chunk.named_modules():
        if not names.is_inside(raw) and not names.is_holder(raw):
            yield NamedModule(names.of(raw), module, stage)
