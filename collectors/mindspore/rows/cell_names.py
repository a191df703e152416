"""Names of the cells and parameters of the watched models."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mindspore import Parameter, nn

from trainsentry.collectors.shared.model_graph import NamedModule


@dataclass(frozen=True)
class NamedParameter:
    """A parameter with the path to it, the cell that owns it, and its model chunk."""

    name: str
    parameter: Parameter
    module: str
    vpp_stage: int

    @property
    def leaf(self) -> str:
        """The parameter's name inside its cell."""
        return self.name.rpartition(".")[2]


@dataclass
class CellNames:
    """Every cell and parameter of the watched model chunks, in registration order; shared ones once.

    Names are paths: a parameter's own `name` attribute depends on where it was assigned last.
    """

    modules: list[NamedModule] = field(default_factory=list)
    parameters: list[NamedParameter] = field(default_factory=list)
    chunks: list[nn.Cell] = field(default_factory=list)

    def add(self, chunks: Sequence[nn.Cell]) -> None:
        """Add model chunks; a list of several numbers them as virtual pipeline stages.

        Where two chunks share a parameter's name, all names begin with the chunk's position: `0.weight`, `1.weight`.
        """
        prefixed = _share_names(chunks)
        for stage, chunk in enumerate(chunks):
            before = (str(stage),) if prefixed else ()
            for path, cell in chunk.cells_and_names():
                self.modules.append(NamedModule(_joined(*before, path), cell, stage))
            for path, parameter in _parameters(chunk):
                name = _joined(*before, path)
                self.parameters.append(NamedParameter(name, parameter, name.rpartition(".")[0], stage))
            self.chunks.append(chunk)

    def copy(self) -> "CellNames":
        """Return an independent copy."""
        return CellNames(list(self.modules), list(self.parameters), list(self.chunks))

    def by_parameter(self) -> dict[int, NamedParameter]:
        """Map the id of each parameter object to its name."""
        return {id(named.parameter): named for named in self.parameters}


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _share_names(chunks: Sequence[nn.Cell]) -> bool:
    """Whether two of several models have a parameter of the same name."""
    names = [path for chunk in chunks for path, _ in _parameters(chunk)]
    return len(set(names)) < len(names)


def _parameters(chunk: nn.Cell) -> list[tuple[str, Parameter]]:
    """Return the parameters by their paths, each once, in registration order."""
    found: dict[int, tuple[str, Parameter]] = {}
    for path, cell in chunk.cells_and_names():
        for leaf, parameter in cell._params.items():
            if isinstance(parameter, Parameter) and id(parameter) not in found:
                found[id(parameter)] = (f"{path}.{leaf}" if path else leaf, parameter)
    for name, parameter in chunk.parameters_and_names():  # those in lists and tuples
        if id(parameter) not in found:
            found[id(parameter)] = (name, parameter)
    return list(found.values())
