"""Capabilities of this version's torch compiler, and calls that keep hooks from disturbing it."""

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

get_eval_frame_callback: Any
set_eval_frame: Any
try:  # once, as an import takes 1.3 µs each time, and hooks ask at each call
    from torch._C._dynamo.eval_frame import get_eval_frame_callback, set_eval_frame
except ImportError:
    get_eval_frame_callback = set_eval_frame = None

_VERSION: Final = tuple(map(int, torch.__version__.split(".")[:2]))

GRADIENTS_FROM: Final = (2, 13)
"""First torch version whose compiled graphs can contain tensor hooks.

Up to 2.9 dynamo refuses such a hook; 2.11 accepts it but breaks in-place ReLU and dynamic shapes.
"""

TRACES_GRADIENTS: Final = _VERSION >= GRADIENTS_FROM
"""Capability: gradients of activations can be observed inside compiled graphs."""

KNOWS_ITS_CALLBACK: Final = _VERSION >= (2, 13)
"""Capability: dynamo can be asked whether it is active. In 2.6 each query loses a reference, and torch crashes."""

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
"""Backends that run a graph operator by operator, so that an added operator changes no result.

Any other may fuse: reading a value in between makes inductor round and sum in another order (bf16 autocast on an AMD
EPYC: 1e-3 of the loss; float32 convolutions with batch norm: 1e-8).
"""

RECOMPILE_FACTOR: Final = 3
"""Graphs of a watched frame per graph of an unwatched one: with sampling, without, and before modules had hooks."""

_raised: dict[str, int] = {}

left_out: Final[Counter[str]] = Counter()
"""Graphs that were not observed because their backend fuses, by backend."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def backend_is_exact() -> bool:
    """Whether the results of the graph being traced stay identical to the bit when values inside it are read.

    Runs while dynamo traces, whose current backend has no public name; an unknown backend counts as fusing.
    """
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        backend = InstructionTranslator.current_tx().output.compiler_fn
        name = str(getattr(backend, "compiler_name", None) or getattr(backend, "__name__", "the backend"))
    except Exception:  # noqa: BLE001 - whatever an untested torch version raises
        name = "the backend"
    if name not in EXACT_BACKENDS:
        left_out[name] += 1
    return name in EXACT_BACKENDS


def is_compiled(module: nn.Module) -> bool:
    """Whether a module carries the marks of `module.compile()` or `torch.compile(module)`."""
    return getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules


def has_compiled() -> bool:
    """Whether dynamo has made a graph in this process; where nobody has imported it (a second), it has made none."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return bool(getattr(dynamo, "counters", {}).get("stats"))


def backward_is_compiled() -> bool:
    """Whether compiled autograd has made a graph of a backward pass in this process."""
    utils = sys.modules.get("torch._dynamo.utils")  # to import it takes seconds
    return utils is not None and bool(utils.counters["compiled_autograd"])


def at_work() -> bool:
    """Whether dynamo may examine a frame that this thread enters now."""
    callback = _callback()
    # None: dynamo is off; False: it only runs frames that are already compiled.
    return callback is not None and callback is not False


def _callback_put_back() -> Any:
    """Return what dynamo calls for a frame that this thread enters: take it away, and put it back."""
    callback = set_eval_frame(None)
    try:
        return callback
    finally:
        set_eval_frame(callback)


_callback: Any = get_eval_frame_callback if KNOWS_ITS_CALLBACK else _callback_put_back


def never_compiled(*functions: Callable[..., Any]) -> bool:
    """Make dynamo run the frames of functions uncompiled, but still inline the functions into other frames.

    `torch.compiler.disable` also does the first, but breaks the graphs of the other frames. Return False when this
    torch lacks one of the functions needed, none of which has a public name.
    """
    try:
        from torch._dynamo.eval_frame import skip_code
    except ImportError:
        return False
    if set_eval_frame is None:
        return False
    for function in (at_work, _callback_put_back, *functions):
        skip_code(function.__code__)
    return True


def allow_for_hooks() -> None:
    """Raise dynamo's limits of graphs per frame, so that limits that suffice without the monitor suffice with it.

    The graphs outlive a closed monitor, and so do the limits. They are raised once, and again after the user has set
    them.
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
