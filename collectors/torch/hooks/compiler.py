"""What torch's compiler can do on this version, and how hooks stay out of its way."""

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

_VERSION: Final = tuple(map(int, torch.__version__.split(".")[:2]))

GRADIENTS_FROM: Final = (2, 13)
"""The torch whose graphs take hooks on tensors inside them.

Up to 2.9 such a hook is refused; 2.11 takes it and then breaks in-place ReLU and dynamic shapes.
"""

TRACES_GRADIENTS: Final = _VERSION >= GRADIENTS_FROM
"""Capability: gradients of activations can be observed inside compiled graphs."""

KNOWS_ITS_CALLBACK: Final = _VERSION >= (2, 13)
"""Capability: dynamo can be asked whether it is at work. 2.6 gives a reference away with each answer, and crashes."""

EXACT_BACKENDS: Final = frozenset(
    {
        "aot_eager",
        "aot_eager_decomp_partition",
        "aot_eager_default_partitioner",
        "eager",
        "eager_debug",
        "eager_noexcept",
    }
)
"""Backends that run a graph operator by operator, so that one operator more changes nothing else.

Any other may fuse: where a value is read in between, inductor rounds and adds up in another order (bf16 autocast on an
AMD EPYC: 1e-3 of the loss; float32 convolutions with batch norm: 1e-8).
"""

RECOMPILE_FACTOR: Final = 3
"""Graphs of a watched frame for each of the bare one: with sampling, without, and from before its modules had hooks."""

_raised: dict[str, int] = {}

left_out: Final[Counter[str]] = Counter()
"""How often hooks have left a graph of a backend alone because it fuses."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def backend_is_exact() -> bool:
    """Whether what a graph that is being traced computes stays the same to the bit if values in it are read.

    Runs while dynamo traces, whose current backend has no public name; an unknown one counts as one that fuses.
    """
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        backend = InstructionTranslator.current_tx().output.compiler_fn
        name = str(getattr(backend, "compiler_name", None) or getattr(backend, "__name__", "the backend"))
    except Exception:  # noqa: BLE001 - whatever a torch that was never seen raises
        name = "the backend"
    if name not in EXACT_BACKENDS:
        left_out[name] += 1
    return name in EXACT_BACKENDS


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` or `torch.compile(module)` was called and shows in the module."""
    return getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules


def has_compiled() -> bool:
    """Whether dynamo has made a graph in this process."""
    from torch._dynamo.utils import counters

    return bool(counters["stats"])


def backward_is_compiled() -> bool:
    """Whether compiled autograd has made a graph of a backward pass in this process."""
    from torch._dynamo.utils import counters

    return bool(counters["compiled_autograd"])


def at_work() -> bool:
    """Whether dynamo may look at a frame that this thread enters now."""
    if not KNOWS_ITS_CALLBACK:
        return True
    from torch._C._dynamo.eval_frame import get_eval_frame_callback  # it has no public name

    # None: dynamo never looks; False: it only runs what it compiled before.
    return get_eval_frame_callback() not in {None, False}


def never_compiled(*functions: Callable[..., Any]) -> bool:
    """Have dynamo run the frames of functions as they are, and yet inline the functions into other frames.

    `torch.compiler.disable` does the first, but breaks the graph of the other frames. Return whether this torch can;
    both calls it needs have no public name.
    """
    try:
        from torch._C._dynamo.eval_frame import get_eval_frame_callback  # noqa: F401 - looked for here, used above
        from torch._dynamo.eval_frame import skip_code
    except ImportError:
        return False
    for function in functions:
        skip_code(function.__code__)
    return True


def allow_for_hooks() -> None:
    """Raise dynamo's limits of graphs for one frame, so that those of the bare run suffice for the watched one.

    The graphs stay when a monitor is closed, and so do the limits; they are raised once, and anew where the user has
    set them since.
    """
    from torch._dynamo import config

    for name, old in (
        ("recompile_limit", "cache_size_limit"),
        ("accumulated_recompile_limit", "accumulated_cache_size_limit"),
    ):
        key = name if hasattr(config, name) else old
        limit = getattr(config, key)
        if _raised.get(key) != limit:
            _raised[key] = limit * RECOMPILE_FACTOR
            setattr(config, key, _raised[key])
