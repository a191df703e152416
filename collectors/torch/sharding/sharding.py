"""One way to spread a model over ranks: what the collectors ask of it, whichever it is.

A kind of sharding is one file with one object that says how its part differs from a model that is not sharded,
and one line in `registry`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from trainsentry.collectors.torch.sharding.local_shards import LocalShard

BeforeReduction = Literal["accumulated", "on_owner", "in_forward"]
"""Where a rank's own gradient can be read before it is reduced: in the parameter's `grad` as it accumulates (DDP), by
a hook on the model's own parameter (DeepSpeed), or on the tensor that stands for it in the forward pass (FSDP)."""

NOTHING: Final[Mapping[int, Sequence[LocalShard]]] = {}


class Sharding:
    """A kind of sharding; the methods here describe a model that is not sharded at all.

    `name_parts` are parts of dotted names that its wrappers add. `holders` are the names of its classes that hold a
    user's model, under the attribute `held_as`. `library` is the package whose frames are not the user's code.
    """

    name: str = ""
    library: str = "torch"
    name_parts: frozenset[str] = frozenset()
    holders: frozenset[str] = frozenset()
    held_as: str = "module"
    before_reduction: BeforeReduction = "accumulated"

    # ------------------------------------------------------------------ the model

    def holds_model(self, module: nn.Module) -> bool:
        """Whether a module is a wrapper of this kind, around the user's model."""
        return any(
            c.__name__ in self.holders and c.__module__.partition(".")[0] == self.library for c in type(module).__mro__
        )

    def is_sharded(self, model: nn.Module) -> bool:
        """Whether parameters of a model are sharded in this way."""
        return False

    def is_data_parallel(self, model: nn.Module) -> bool | None:
        """Whether each rank trains on data of its own; False speaks for all kinds, None says nothing."""
        return True if any(self.holds_model(m) for m in model.modules()) else None

    def local_shards(self, model: nn.Module, outer: Sequence["OuterOptimizer"]) -> Mapping[int, Sequence[LocalShard]]:
        """Return, by the id of each sharded parameter object, what this rank holds of it.

        Raises:
            RuntimeError: when the library keeps its shards in a way that is not known.

        """
        return NOTHING

    def in_forward(self, module: nn.Module, leaf: str) -> Tensor | None:
        """Return the tensor that stands for a module's parameter `leaf` in its forward pass."""
        tensor = getattr(module, leaf, None)
        return tensor if isinstance(tensor, Tensor) else None

    def snapshot(self, model: nn.Module) -> Any:
        """Return what `wrapped_since` compares with: whether `model` is sharded now."""
        return self.is_sharded(model)

    def wrapped_since(self, snapshot: Any, running: nn.Module) -> str:
        """Return what wrapped the running model after the snapshot was taken, "" for nothing."""
        return f"{self.name} or another wrapper that shards it" if self.is_sharded(running) and not snapshot else ""

    # ------------------------------------------------------------------ its optimizer

    def engine_optimizer(self, model: nn.Module) -> Any:
        """Return the optimizer that an engine around the model brings along, None where there is none."""
        return None

    def inner_optimizer(self, optimizer: Any) -> Optimizer | None:
        """Return the optimizer of torch that one of this kind steps, None where it is none of this kind."""
        return None

    def loss_scale(self, optimizer: Any) -> float:
        """Return the factor by which an optimizer of this kind has the loss multiplied."""
        return 1.0

    def adapts_loss_scale(self, optimizer: Any) -> bool:
        """Whether an optimizer of this kind searches for a loss scale, and so skips a step now and then by design."""
        return False

    def reduced_gradients(self, optimizer: Any) -> dict[int, Tensor]:
        """Return, by the id of a parameter, references to this rank's reduced gradients before a step.

        A step that overflows frees the optimizer's own references; then these are all that is left.
        """
        return {}


@dataclass(frozen=True)
class OuterOptimizer:
    """An optimizer around one of torch's: it alone knows when a step begins, ends or is skipped."""

    optimizer: Any
    inner: Optimizer
    sharding: Sharding

    @property
    def loss_scale(self) -> float:
        """The factor by which it has the loss multiplied."""
        return self.sharding.loss_scale(self.optimizer)

    @property
    def adapts_loss_scale(self) -> bool:
        """Whether it searches for a loss scale."""
        return self.sharding.adapts_loss_scale(self.optimizer)

    def reduced_gradients(self) -> dict[int, Tensor]:
        """Return references to this rank's reduced gradients, by the ids of their parameters."""
        return self.sharding.reduced_gradients(self.optimizer)
