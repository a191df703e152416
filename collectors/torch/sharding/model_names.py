"""Names of the modules and parameters of everything that is watched, and what a rank holds of each parameter."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from trainsentry.collectors.shared.model_graph import NamedModule
from trainsentry.collectors.torch.sharding import deepspeed, fsdp1
from trainsentry.collectors.torch.sharding.clean_names import CleanNames
from trainsentry.collectors.torch.sharding.deepspeed import wrappers_of
from trainsentry.collectors.torch.sharding.local_shards import NamedParameter


def parameters_of_chunk(
    chunk: nn.Module, stage: int, names: CleanNames, wrappers: Iterable[Any] = ()
) -> Iterator[NamedParameter]:
    """Yield the parameters of a model chunk by the user's names, each with where its values lie on this rank.

    `wrappers` are DeepSpeed's optimizers, which hold the values.
    """
    partitions: deepspeed.Held = {}
    for optimizer in wrappers:
        partitions |= deepspeed.held_by(optimizer, chunk)
    shards = fsdp1.of_model(chunk)
    for raw, parameter in chunk.named_parameters():
        if fsdp1.is_flat(parameter):
            prefix = raw.rpartition(".")[0]
            for inner, fragment in fsdp1.inside(parameter):
                name = names.of(f"{prefix}.{inner}" if prefix else inner)
                yield NamedParameter(name, parameter, _module(name), stage, fragment)
            continue
        name = names.of(raw)
        held = partitions.get(id(parameter))
        if held is not None:
            yield NamedParameter(name, held[0], _module(name), stage, held[1], parameter)
        else:
            yield NamedParameter(name, parameter, _module(name), stage, shards.get(id(parameter)))


def _module(name: str) -> str:
    return name.rpartition(".")[0]


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
