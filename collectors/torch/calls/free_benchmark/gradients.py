"""Makes the backward pass of a call again, from its arguments and the gradients that arrived at its results."""

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from trainsentry.collectors.calls.call import Call
from trainsentry.collectors.calls.free_benchmark import PART, TO_CPU
from trainsentry.collectors.torch.calls.call_gradients import GradientsOfCall
from trainsentry.collectors.torch.calls.free_benchmark.again import OriginalCall, as_it_was, with_leaves
from trainsentry.collectors.torch.calls.free_benchmark.perturbations import mapped, perturbed
from trainsentry.collectors.torch.hooks.backward_pass import after_backward, in_backward
from trainsentry.collectors.torch.hooks.nested_tensors import list_tensors


class BackwardTrial:
    """Listens to the gradients of one call, and has its benchmark compare them.

    Until then it keeps the call's arguments, detached from the graph.
    """

    def __init__(self, benchmark: Any, call: Call, original: OriginalCall) -> None:
        self.benchmark = benchmark
        self.call = call
        self.step = benchmark.steps
        args, kwargs = mapped((original.args, dict(original.kwargs)), Tensor.detach)
        given = tuple((t.detach(), version) for t, version in original.given)
        self.original: OriginalCall | None = replace(original, args=args, kwargs=kwargs, given=given)

    def run(self, function: Any, *args: Any) -> Any:
        """Call a function under the benchmark's guard."""
        return self.benchmark.guard.run(PART, function, *args)

    def began(self, gradients: GradientsOfCall) -> bool:
        """Note that the backward pass has reached the call."""
        if self.original is None or not self.benchmark.wants_backward(self.call, self.step):
            self.original = None
            return False
        if in_backward():
            after_backward(lambda: self.run(gradients.finish))
        return True

    def arrived(self, place: int, gradient: Tensor) -> Tensor:
        """Keep a gradient at a result as it is now: the node may write into it."""
        del place
        return gradient.detach().clone()

    def done(self, inputs: list[Any], outputs: list[Tensor | None]) -> None:
        """Compare the gradients at the arguments."""
        original, self.original = self.original, None
        if original is None or not any(gradient is not None for gradient in inputs):
            return
        if not original.is_intact:
            self.benchmark.left_out["whose arguments have changed since"] += 1
            return
        with torch.no_grad():
            self.benchmark.check(self.call, outputs, lambda mode: self._again(original, inputs, mode))

    def _again(self, call: OriginalCall, gradients: list[Any], mode: str) -> list[Any] | None:
        """Return the gradients at the arguments, None where there is none."""
        changed = perturbed(mode, tuple(gradients), {}, autocast=call.under_autocast)
        # The noise is in the gradients that arrive; a higher precision or the CPU is for the arguments too.
        arguments = perturbed(mode, call.args, call.kwargs, autocast=call.under_autocast) if mode in _WHOLE else None
        if changed is None and arguments is None:
            return None
        args, kwargs = arguments or (call.args, dict(call.kwargs))
        grads = list(changed[0]) if changed is not None else gradients
        args, kwargs, leaves = with_leaves(call, args, kwargs)
        with torch.enable_grad(), as_it_was(call, mode):
            return _differentiated(list_tensors([call.function(*args, **kwargs)]), leaves, grads)


_WHOLE: Final = frozenset({"improve_precision", TO_CPU})


def _differentiated(results: list[Tensor], leaves: list[Tensor | None], gradients: list[Any]) -> list[Any]:
    """Return the gradients at leaves; of a leaf that occurs twice each time."""
    used = [
        (r, g.to(r.device, r.dtype))
        for r, g in zip(results, gradients, strict=False)
        if g is not None and r.requires_grad
    ]
    different = list({id(t): t for t in leaves if t is not None}.values())
    found = torch.autograd.grad([r for r, _ in used], different, [g for _, g in used], allow_unused=True)
    of = {id(t): g for t, g in zip(different, found, strict=True)}
    return [None if t is None else of[id(t)] for t in leaves]
