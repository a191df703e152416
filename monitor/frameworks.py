"""Finds the collectors for a model's framework, without importing any framework the user did not."""

from dataclasses import dataclass
from typing import Any

from trainsentry.collectors.shared.adapted_torch import adapted_torch


@dataclass(frozen=True)
class Framework:
    """What the monitor needs of a framework: each attribute is a function, class or module of its collectors."""

    watch: Any
    saving: Any
    rank_and_world_size: Any
    describe_environment: Any
    meet: Any
    max_reduce: Any
    follow: Any


def framework_of(model: Any) -> Framework:
    """Return the framework of a model or of a list of model chunks.

    Raises:
        TypeError: when it is none that is supported.

    """
    first = model[0] if isinstance(model, (list, tuple)) and model else model
    bases = {base.__module__.partition(".")[0] for base in type(first).__mro__}
    if "torch" in bases and adapted_torch() is None:
        from trainsentry.collectors.torch import environment, saving
        from trainsentry.collectors.torch.distributed.rendezvous import GroupMaxReduce, meet
        from trainsentry.collectors.torch.watch import TorchWatch, follow

        return Framework(
            watch=TorchWatch,
            saving=saving,
            rank_and_world_size=environment.rank_and_world_size,
            describe_environment=environment.describe_environment,
            meet=meet,
            max_reduce=GroupMaxReduce,
            follow=follow,
        )
    if "mindspore" in bases:
        from trainsentry.collectors.mindspore import rendezvous as mindspore_rendezvous
        from trainsentry.collectors.mindspore import runtime as mindspore_environment
        from trainsentry.collectors.mindspore import saving as mindspore_saving
        from trainsentry.collectors.mindspore.watch import MindSporeWatch
        from trainsentry.collectors.ranks.rendezvous import SocketMaxReduce

        return Framework(
            watch=MindSporeWatch,
            saving=mindspore_saving,
            rank_and_world_size=mindspore_environment.rank_and_world_size,
            describe_environment=mindspore_environment.describe_environment,
            meet=mindspore_rendezvous.meet,
            max_reduce=SocketMaxReduce,
            follow=mindspore_rendezvous.follow,
        )
    name = type(first).__name__
    raise TypeError(f"watch(model): got {name}, allowed: torch.nn.Module or mindspore.nn.Cell, or a list of them")
