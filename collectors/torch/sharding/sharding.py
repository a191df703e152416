"""Defines the interface of a kind of sharding.

Each kind is one file with one object, which overrides the methods where it differs from an unsharded model, and one
line in `registry`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from trainsentry.collectors.torch.sharding.local_shards import LocalShard

BeforeReduction = Literal["accumulated", "on_owner", "in_forward"]
"""Where a rank's own gradient is read before reduction: in the parameter's `grad` as it accumulates (DDP), by a hook on
the model's own parameter (DeepSpeed), or by a hook on the tensor that the forward pass uses in its place (FSDP)."""

NOTHING: Final[Mapping[int, Sequence[LocalShard]]] = {}


class Sharding:
    """A kind of sharding; the methods of this base class describe an unsharded model.

    `name_parts` are the parts of dotted names that its wrappers add. `holders` are the class names of its wrappers,
    which keep the user's model in the attribute `held_as`. `library` is its package, whose stack frames are not the
    user's code.
    """

    name: str = ""
    library: str = "torch"
    name_parts: frozenset[str] = frozenset()
    holders: frozenset[str] = frozenset()
    held_as: str = "module"
    before_reduction: BeforeReduction = "accumulated"

    # ------------------------------------------------------------------ the model

    def holds_model(self, module: nn.Module) -> bool:
        """Whether a module is a wrapper of this kind around the user's model."""
        return any(
            c.__name__ in self.holders and c.__module__.partition(".")[0] == self.library for c in type(module).__mro__
        )

    def is_sharded(self, model: nn.Module) -> bool:
        """Whether any parameter of a model is sharded in this way."""
        return False

    def is_data_parallel(self, model: nn.Module) -> bool | None:
        """Whether each rank trains on its own data; False overrules all other kinds, None abstains."""
        return True if any(self.holds_model(m) for m in model.modules()) else None

    def local_shards(self, model: nn.Module, outer: Sequence["OuterOptimizer"]) -> Mapping[int, Sequence[LocalShard]]:
        """Map the id of each sharded parameter object to its parts on this rank.

        Raises:
            RuntimeError: when the layout of the library's shards is unknown.

        """
        return NOTHING

    def in_forward(self, module: nn.Module, leaf: str) -> Tensor | None:
        """Return the tensor that a module's forward pass uses in place of its parameter `leaf`."""
        tensor = getattr(module, leaf, None)
        return tensor if isinstance(tensor, Tensor) else None

    def snapshot(self, model: nn.Module) -> Any:
        """Return the state that `wrapped_since` compares with; by default, whether `model` is sharded now."""
        return self.is_sharded(model)

    def wrapped_since(self, snapshot: Any, running: nn.Module) -> str:
        """Return the name of the wrapper that the running model got after the snapshot, "" for none."""
        return f"{self.name} or another wrapper that shards it" if self.is_sharded(running) and not snapshot else ""

    # ------------------------------------------------------------------ its optimizer

    def engine_optimizer(self, model: nn.Module) -> Any:
        """Return the optimizer of an engine around the model, None where there is none."""
        return None

    def inner_optimizer(self, optimizer: Any) -> Optimizer | None:
        """Return the torch optimizer inside an optimizer of this kind, None for any other optimizer."""
        return None

    def loss_scale(self, optimizer: Any) -> float | Tensor:
        """Return the loss scale of an optimizer of this kind; a tensor of one element is read without waiting."""
        return 1.0

    def adapts_loss_scale(self, optimizer: Any) -> bool:
        """Whether an optimizer of this kind adapts its loss scale, and so skips some steps by design."""
        return False

    def reduced_gradients(self, optimizer: Any) -> dict[int, Tensor]:
        """Return references to this rank's reduced gradients before a step, by parameter id.

        An overflowing step frees the optimizer's own references; these keep the gradients alive.
        """
        return {}


@dataclass(frozen=True)
class OuterOptimizer:
    """An optimizer around a torch optimizer; only the outer one determines when a step begins, ends or is skipped.

    `stepped_by` has the `step` that the loop calls: the outer optimizer, or a chain of several that steps them itself.
    """

    optimizer: Any
    inner: Optimizer
    sharding: Sharding
    stepped_by: Any

    @property
    def loss_scale(self) -> float | Tensor:
        """Its loss scale."""
        return self.sharding.loss_scale(self.optimizer)

    @property
    def adapts_loss_scale(self) -> bool:
        """Whether it adapts its loss scale, and so skips some steps by design."""
        return self.sharding.adapts_loss_scale(self.optimizer)

    def reduced_gradients(self) -> dict[int, Tensor]:
        """Return references to this rank's reduced gradients, by parameter id."""
        return self.sharding.reduced_gradients(self.optimizer)
