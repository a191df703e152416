"""The steps of a model that is not watched on this rank, for those who only count them."""

from typing import Any

from trainsentry.collectors.torch.optimizer_steps import OptimizerSteps, StepListener, watch_scalers
from trainsentry.collectors.torch.validation import check_scaler, checked_models, checked_optimizers


def follow(model: Any, optimizer: Any, grad_scaler: Any, listener: StepListener) -> OptimizerSteps:
    """Tell `listener` of the optimizers' steps, after the checks of `watch`.

    Raises:
        TypeError, ValueError: as `watch` does.

    """
    optimizers = checked_optimizers(optimizer, checked_models(model))
    check_scaler(grad_scaler)
    outer = {id(inner): wrapper for inner, wrapper in optimizers.items() if wrapper is not None}
    steps = OptimizerSteps(list(optimizers), listener, outer)
    watch_scalers(steps, grad_scaler)
    return steps
