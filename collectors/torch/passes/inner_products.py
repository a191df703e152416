"""The inner products of a module's tensors with their gradients, which a right backward pass keeps equal."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from trainsentry.collectors.torch.passes.operation_nodes import is_python_function, may_be_hooked
from trainsentry.collectors.torch.rows.local_tensor import are_plain, version_of

INPUT: Final = "input"
"""The name of the gap at a module's input; that at its parameters has the name of the first of them."""

GRADIENTS: Final = "gradients"
"""The name of the gap between the two, where the output is not known."""

TRANSPOSED: Final = "TBackward"
CAST: Final = "ToCopyBackward"
MOST_NODES: Final = 3
"""Nodes between an operation and its weight: `nn.Linear` transposes it, and autocast makes a copy of another dtype."""

SAVES_ITS_INPUT: Final = ("Addmm", "Mm", "Linear", "Convolution")
"""How the names of nodes begin that keep the input themselves, for the gradient of a weight."""

AT_ONCE: Final = 2**22
"""Elements that are multiplied at once where a copy is needed, 16 MB in float32."""

FLOATS: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})


@dataclass(frozen=True, slots=True)
class Operand:
    """A parameter, or a tensor without its graph, and its count of writes as it was kept.

    Of a parameter it is the very tensor, whose memory sharded training may take away.
    """

    tensor: Tensor
    version: int | None

    @property
    def is_whole(self) -> bool:
        """Whether its values are still those that were kept."""
        return version_of(self.tensor) == self.version and are_plain([self.tensor.detach()])


@dataclass(frozen=True, slots=True)
class OwnParameter:
    """A parameter of a module, with the place of its gradient among those that a node returns.

    That gradient may be the one of its transpose.
    """

    name: str
    place: int
    is_transposed: bool
    kept: Operand

    @property
    def is_matrix(self) -> bool:
        """Whether it multiplies the input; others are added, or are the factors of a normalization."""
        return self.kept.tensor.ndim > 1


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A module's call, without its graph: a node of autograd may not keep what keeps the node."""

    own: Sequence[OwnParameter]
    given: Operand | None
    output: Operand | None

    def gaps(self, used: Sequence[Tensor | None], arrived: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """Return by how much products part that should be equal, in the size of unrelated ones; tensors of shape ().

        `used` are the gradients that the module's node has returned, and `arrived` those that it got. An output y that
        is linear in the parameters together has ⟨y, g_y⟩ = Σ ⟨p, g_p⟩; one of the first degree in the input, and linear
        in a matrix, has ⟨x, g_x⟩ = ⟨y, g_y⟩ − ⟨b, g_b⟩. Tensors that were overwritten meanwhile have no part in it.
        """
        products, own_places = _Products(), {own.place for own in self.own}
        output = products.of(self.output, arrived)
        given = products.of(self.given, [g for i, g in enumerate(used) if i not in own_places])
        matrices = [products.of_parameter(own, used[own.place]) for own in self.own if own.is_matrix]
        others = [products.of_parameter(own, used[own.place]) for own in self.own if not own.is_matrix]
        if None in matrices + others:
            return {}
        equal = {}
        if output is not None and self.own:
            equal[self.own[0].name] = [output], [*matrices, *others]
        if given is not None and output is not None and (matrices or not others):
            equal[INPUT] = [output], [given, *others]
        elif given is not None and matrices:
            equal[GRADIENTS] = [given], matrices
        return products.gaps(equal) if equal else {}


@dataclass(slots=True)
class _Products:
    """Pairs of tensors: their inner products, and the size that these would have of two with nothing in common."""

    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def of(self, kept: Operand | None, gradients: Iterable[Tensor | None]) -> int | None:
        """Take in a tensor with its only gradient; return their place, None where they cannot be compared."""
        found = [g for g in gradients if g is not None]
        if kept is None or len(found) != 1 or not found[0].numel() or kept.tensor.dtype not in FLOATS:
            return None
        if found[0].numel() != kept.tensor.numel() or found[0].device != kept.tensor.device or not kept.is_whole:
            return None
        self.pairs.append((kept.tensor.detach(), found[0]))
        return len(self.pairs) - 1

    def of_parameter(self, own: OwnParameter, gradient: Tensor | None) -> int | None:
        """Take in a parameter with its gradient, which may be that of its transpose."""
        return self.of(own.kept, [gradient.t() if own.is_transposed and gradient is not None else gradient])

    def gaps(self, equal: Mapping[str, tuple[Sequence[Any], Sequence[Any]]]) -> dict[str, Tensor]:
        """Return, by name, by how much the sums of the products at two lists of places part."""
        norms = torch._foreach_norm([x for pair in self.pairs for x in pair], dtype=torch.float32)
        sizes = torch._foreach_mul(norms[::2], norms[1::2])
        torch._foreach_div_(sizes, [math.sqrt(a.numel()) for a, _ in self.pairs])
        inner = [_inner(a, b) for a, b in self.pairs]
        gaps = {}
        for name, (left, right) in equal.items():
            apart = _sum(inner, left) - _sum(inner, right)
            gaps[name] = apart.abs() / _sum(sizes, [*left, *right])
        return gaps


def keeps_its_input(node: Any, own: Sequence[OwnParameter]) -> bool:
    """Whether a node keeps its module's input until the backward pass, so that it costs nothing to keep it too."""
    if (
        is_python_function(node)
        or not node.name().startswith(SAVES_ITS_INPUT)
        or not any(each.is_matrix for each in own)
    ):
        return False
    if any(before is not None and before.name().startswith(CAST) for before, _ in node.next_functions):
        return False  # it keeps a copy of another dtype
    return not may_be_hooked()


def own_parameters(node: Any, module: nn.Module) -> list[OwnParameter] | None:
    """Return the parameters of a module by their places among the inputs of a node, matrices first.

    None where the module has a parameter that is none of them.
    """
    names = {id(p): name for name, p in module._parameters.items() if p is not None}
    found = []
    for place, (before, _) in enumerate(node.next_functions):
        variable, is_transposed = _variable_of(before)
        if variable is not None and id(variable) in names:
            found.append(
                OwnParameter(names[id(variable)], place, is_transposed, Operand(variable, version_of(variable)))
            )
    return sorted(found, key=lambda own: not own.is_matrix) if len(found) == len(names) else None


def _variable_of(node: Any) -> tuple[Tensor | None, bool]:
    """Return the leaf that a node of autograd leads to, and whether it is transposed on the way."""
    is_transposed = False
    for _ in range(MOST_NODES):
        if (
            node is None
            or is_python_function(node)
            or not node.name().startswith((TRANSPOSED, CAST))
            or not node.next_functions
        ):
            break
        is_transposed ^= node.name().startswith(TRANSPOSED)
        node = node.next_functions[0][0]
    return getattr(node, "variable", None), is_transposed


def _sum(numbers: Sequence[Tensor], places: Sequence[int]) -> Tensor:
    """Return the sum of some numbers; of one, itself, as each operation here is a launch on a device."""
    total = numbers[places[0]]
    for place in places[1:]:
        total = total + numbers[place]
    return total


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of two tensors with as many elements in the same order, in float32."""
    if a.dtype == b.dtype == torch.float32 and a.is_contiguous() and b.is_contiguous():
        return torch.dot(a.view(-1), b.view(-1))
    rows_of_a = a.reshape(-1, a.shape[-1] if a.ndim else 1)
    rows_of_b = b.reshape(rows_of_a.shape)
    rows = max(1, AT_ONCE // rows_of_a.shape[1])
    parts = [(x.to(torch.float32) * y).sum() for x, y in zip(rows_of_a.split(rows), rows_of_b.split(rows), strict=True)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()
