"""Names the modules and parameters of the watched model, with this rank's part of each parameter."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from trainsentry.collectors.shared.model_graph import NamedModule
from trainsentry.collectors.torch.optimizers.masters import masters_of
from trainsentry.collectors.torch.sharding.clean_names import CleanNames
from trainsentry.collectors.torch.sharding.local_shards import LocalShard, NamedParameter
from trainsentry.collectors.torch.sharding.registry import local_shards, outer_optimizers
from trainsentry.collectors.torch.sharding.sharding import OuterOptimizer


def parameters_of_chunk(
    chunk: nn.Module,
    stage: int,
    names: CleanNames,
    outer: Sequence[OuterOptimizer] = (),
    optimizers: Sequence[Any] = (),
) -> Iterator[NamedParameter]:
    """Yield the parameters of a model chunk under the user's names, each with its part on this rank.

    `outer` are the optimizers that may store the values in place of the model, `optimizers` those that may hold fp32
    masters of them.
    """
    shards = local_shards(chunk, outer)
    masters = masters_of(list(chunk.parameters()), optimizers)
    for raw, parameter in chunk.named_parameters():
        master = masters.get(id(parameter))
        whole = LocalShard(parameter) if master is None else LocalShard(master, owner=parameter)
        sharding, parts = shards.get(id(parameter), (None, (whole,)))
        for part in parts:
            name = names.of(".".join((raw.rpartition(".")[0], part.name)).strip(".") if part.name else raw)
            module = name.rpartition(".")[0]
            yield NamedParameter(name, part.parameter, module, stage, part.fragment, part.owner, sharding)


def share_names(chunks: Sequence[nn.Module]) -> bool:
    """Whether two of several models have a parameter of the same name, so that names need the model's number."""
    found: set[str] = set()
    for chunk in chunks if len(chunks) > 1 else ():
        names = CleanNames(chunk)
        own = {names.of(raw) for raw, _ in chunk.named_parameters()}
        if own & found:
            return True
        found |= own
    return False


@dataclass
class ModelNames:
    """Every module and parameter of the watched model chunks, in registration order, shared ones once."""

    modules: list[NamedModule] = field(default_factory=list)
    parameters: list[NamedParameter] = field(default_factory=list)
    chunks: list[nn.Module] = field(default_factory=list)

    def add(self, chunks: Sequence[nn.Module], optimizers: Iterable[Any] = ()) -> None:
        """Add model chunks; a chunk's position is its virtual pipeline stage.

        Where two chunks share a parameter's name, all names begin with the chunk's position: `0.weight`, `1.weight`.

        `optimizers` may store the values of parameters in place of the model: shards of them, or fp32 masters.
        """
        optimizers = list(optimizers)
        outer = outer_optimizers(chunks, optimizers)
        prefixed = share_names(chunks)
        for stage, chunk in enumerate(chunks):
            names = CleanNames(chunk, str(stage) if prefixed else "")
            self.modules.extend(_modules(chunk, stage, names))
            self.parameters.extend(parameters_of_chunk(chunk, stage, names, outer, optimizers))
            self.chunks.append(chunk)

    def copy(self) -> "ModelNames":
        """Return a copy with lists of its own."""
        return ModelNames(list(self.modules), list(self.parameters), list(self.chunks))

    def by_parameter(self) -> dict[Tensor, list[NamedParameter]]:
        """Map each parameter object to the named parameters that it contains."""
        found: dict[Tensor, list[NamedParameter]] = {}
        for named in self.parameters:
            found.setdefault(named.parameter, []).append(named)
        return found


def _modules(chunk: nn.Module, stage: int, names: CleanNames) -> Iterator[NamedModule]:
    for raw, module in chunk.named_modules():
        if not names.is_inside(raw) and not names.is_holder(raw):
            yield NamedModule(names.of(raw), module, stage)
