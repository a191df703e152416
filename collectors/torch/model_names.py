"""Names of modules and parameters as the user's model gives them, whatever wraps it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from torch import nn

WRAPPERS: Final = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Names under which torch's own wrappers keep the module they wrap; they are no part of a user's name."""


def clean_name(name: str) -> str:
    """Drop the wrappers' parts from a dotted name.

    >>> clean_name("_orig_mod.layers.0._checkpoint_wrapped_module.fc.weight")
    'layers.0.fc.weight'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


@dataclass(frozen=True)
class NamedModule:
    """A module with its clean name and the model chunk (`vpp_stage`) that it belongs to."""

    name: str
    module: nn.Module
    vpp_stage: int


@dataclass(frozen=True)
class NamedParameter:
    """A parameter with its clean name, the module that owns it, and its model chunk."""

    name: str
    parameter: nn.Parameter
    module: str
    vpp_stage: int

    @property
    def leaf(self) -> str:
        """The parameter's name inside its module."""
        return self.name.rpartition(".")[2]


@dataclass
class ModelNames:
    """Every module and parameter of the watched model chunks, in registration order; shared ones once."""

    modules: list[NamedModule] = field(default_factory=list)
    parameters: list[NamedParameter] = field(default_factory=list)

    def add(self, chunks: Sequence[nn.Module]) -> None:
        """Add model chunks; a list of several numbers them as virtual pipeline stages."""
        for stage, chunk in enumerate(chunks):
            self.modules.extend(_modules(chunk, stage))
            self.parameters.extend(_parameters(chunk, stage))

    def by_parameter(self) -> dict[nn.Parameter, NamedParameter]:
        """Map each parameter object to its name."""
        return {p.parameter: p for p in self.parameters}


def _modules(chunk: nn.Module, stage: int) -> Iterator[NamedModule]:
    for raw, module in chunk.named_modules():
        if not raw or raw.rpartition(".")[2] not in WRAPPERS:
            yield NamedModule(clean_name(raw), module, stage)


def _parameters(chunk: nn.Module, stage: int) -> Iterator[NamedParameter]:
    for raw, parameter in chunk.named_parameters():
        name = clean_name(raw)
        yield NamedParameter(name, parameter, name.rpartition(".")[0], stage)
