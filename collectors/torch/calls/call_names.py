"""Names operations as msprobe does, from the functions that `__torch_function__` gets.

The function alone does not tell how it was called: `x + 1` arrives as `Tensor.add`, `x @ y` as `Tensor.matmul`,
`F.sigmoid(x)` as `Tensor.sigmoid`. The bytecode instruction of the call, and the function it is in, tell them apart.
"""

import dis
import importlib
from collections.abc import Callable, Sequence
from types import CodeType, FrameType, MethodWrapperType
from typing import Any, Final

import torch
from torch import Tensor

from trainsentry.collectors.torch.device.npu import torch_npu

OPERATORS: Final = {
    "add": "__add__",
    "sub": "__sub__",
    "mul": "__mul__",
    "div": "__truediv__",
    "matmul": "__matmul__",
    "remainder": "__mod__",
    "lt": "__lt__",
    "le": "__le__",
    "gt": "__gt__",
    "ge": "__ge__",
    "eq": "__eq__",
    "ne": "__ne__",
    "add_": "__iadd__",
    "sub_": "__isub__",
    "mul_": "__imul__",
    "div_": "__itruediv__",
    "remainder_": "__imod__",
    "pow_": "__ipow__",
}
"""Methods that stand for operators, with the operator's own name."""

_CALLED_BY: Final = {"sigmoid": "Functional.sigmoid", "tanh": "Functional.tanh"}
"""Methods that a function of torch.nn.functional calls, with that function's name: it calls no mode itself."""

_ALIASES: Final = {
    "Distributed.all_gather_single": "Distributed.all_gather_into_tensor",
    "Distributed.reduce_scatter_single": "Distributed.reduce_scatter_tensor",
    "Functional.log_sigmoid": "Functional.logsigmoid",
}
"""Inner names of torch 2.13, with the public name of the function that wraps each."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LEFT_OUT: Final = _names(
    """
    __array__ __array_wrap__ __bool__ __complex__ __contains__ __deepcopy__ __delattr__ __delitem__ __dir__ __dlpack__
    __dlpack_device__ __float__ __format__ __getitem__ __hash__ __index__ __init__ __int__ __invert__ __iter__ __len__
    __long__ __neg__ __nonzero__ __pos__ __reduce__ __reduce_ex__ __repr__ __reversed__ __setattr__ __setstate__
    __sizeof__ __str__ _is_view _use_count allclose apply_ as_strided as_strided_ as_subclass as_tensor asarray backward
    contiguous copy_ cpu cuda data_ptr detach detach_ dim dim_order element_size empty empty_like empty_permuted
    empty_strided equal from_numpy frombuffer get_device is_coalesced is_complex is_conj is_contiguous is_distributed
    is_floating_point is_inference is_neg is_nonzero is_pinned is_same_size is_set_to is_shared is_signed is_storage
    is_tensor item map_ module_load ndimension nelement new new_empty new_empty_strided new_full new_ones
    new_tensor new_zeros numel numpy npu ones ones_like pin_memory positive rand rand_like randint randint_like randn
    randn_like random_ record_stream register_hook register_post_accumulate_grad_hook requires_grad_ resize_
    resolve_conj resolve_neg retain_grad set_ share_memory_ size storage storage_offset storage_type stride
    tensor to_dense tolist type uniform_ normal_ untyped_storage view_as_complex view_as_real where_ xpu zero_ zeros
    zeros_like"""
)
"""Calls that compute nothing from values, or only query them; msprobe 26.2 leaves them out too, except three
(`__bool__`, `numpy`, `stride`) that its default risk level leaves out."""

MOVING: Final = _names(
    """align_as align_to arange atleast_1d atleast_2d atleast_3d bfloat16 bool byte cat cfloat char chunk clamp clone
    column_stack concat concatenate diag diag_embed diagflat double dsplit dstack expand expand_as eye flatten float
    full full_like half hsplit hstack identity int linspace logspace long moveaxis movedim permute ravel repeat
    repeat_interleave reshape reshape_as row_stack split split_with_sizes squeeze stack swapaxes swapdims tensor_split
    tile to transpose tril tril_indices triu triu_indices type_as unbind unflatten unfold unsafe_chunk unsafe_split
    unsafe_split_with_sizes unsqueeze view view_as vsplit vstack"""
)
"""Calls that move, copy or create values, which `risk_level` FOCUS leaves out (msprobe 26.2's low risk)."""

CORE: Final = _names(
    """
    __matmul__ _batch_norm_impl_index _convolution _fused_adam_ _fused_adamw_ addbmm addbmm_ addmm addmm_ addmv addmv_
    addr addr_ baddbmm baddbmm_ batch_norm bilinear bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d conv_transpose3d convolution embedding embedding_bag group_norm instance_norm layer_norm linear
    local_response_norm matmul mm multi_dot multi_head_attention_forward mv scaled_dot_product_attention vecdot"""
)
"""Matrix products, convolutions, norms, embeddings and attention, which `risk_level` CORE records, together with every
collective and every fused operation of an NPU."""

_CORE_PREFIXES: Final = frozenset({"Distributed", "NPU", "MindSpeed"})


def risk_of(name: str) -> str:
    """Return the risk level of an operation's name without its number: CORE, FOCUS or LOW.

    >>> risk_of("Functional.linear"), risk_of("Tensor.view"), risk_of("Tensor.__add__")
    ('CORE', 'LOW', 'FOCUS')
    """
    prefix, _, operation = name.partition(".")
    if prefix in _CORE_PREFIXES or operation in CORE:
        return "CORE"
    return "LOW" if operation in MOVING else "FOCUS"


_RECORDED_FOREACH: Final = frozenset({"_foreach_norm"})
"""Operations over lists of tensors that are recorded, as by msprobe 26.2. The others are the inside of an optimizer's
step: recording them would read each weight and state a dozen times."""


class CallNames:
    """Names functions; `namespaces` are those of `torch.ops` that are named besides `aten` and `npu`."""

    def __init__(self, namespaces: Sequence[str] = ()) -> None:
        self.namespaces = {"aten": "Aten", "npu": "NPU", **{n: n for n in namespaces}}
        self._names: dict[Any, str | None] = {}
        self._public = _public_names()
        self._operators: dict[tuple[CodeType, int], bool] = {}
        self._wrappers = _wrappers()

    def leaves_out(self, function: Any) -> bool:
        """Whether a function is known to have no name under any caller; most such calls read attributes."""
        return type(function) is MethodWrapperType or self._names.get(function, "") is None

    def name_of(self, function: Any, frame: FrameType | None) -> str | None:
        """Return the name of a call without its number, None for one that is left out; `frame` is the caller's."""
        try:
            name = self._names[function]
        except KeyError:
            name = self._names[function] = self._find(function)
        if name is None or frame is None or not name.startswith("Tensor."):
            return name
        method = name[7:]
        if method in _CALLED_BY and frame.f_code in self._wrappers:
            return _CALLED_BY[method]
        if method in OPERATORS and type(function).__name__ == "method_descriptor" and self._is_operator(frame):
            return f"Tensor.{OPERATORS[method]}"
        return name

    def _find(self, function: Any) -> str | None:
        name = getattr(function, "__name__", "")
        if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            space, _, operation = getattr(function, "_qualified_op_name", "").partition("::")
            prefix = self.namespaces.get(space)
            return prefix and f"{prefix}.{operation.partition('.')[0]}"
        if name in LEFT_OUT or not name:
            return None
        if getattr(function, "__module__", None) == "torch.distributed.distributed_c10d":
            return _ALIASES.get(f"Distributed.{name}", f"Distributed.{name}")
        if (
            getattr(function, "__objclass__", None) is not None
            or getattr(function, "__module__", "") == "torch._tensor"
        ):
            # An operator calls a method that Python wraps: `x ** 2` arrives as a function named `pow`.
            wrapped = name == "pow" and not hasattr(function, "__objclass__")
            return f"Tensor.{'__pow__' if wrapped else name}"
        if name.startswith("_foreach_") and name not in _RECORDED_FOREACH:
            return None
        public = self._public.get(id(function))
        return _ALIASES.get(public, public) if public is not None else None

    def _is_operator(self, frame: FrameType) -> bool:
        place = (frame.f_code, frame.f_lasti)
        known = self._operators.get(place)
        if known is None:
            names = [i.opname for i in dis.get_instructions(frame.f_code) if i.offset == frame.f_lasti]
            known = self._operators[place] = bool(names) and not names[0].startswith("CALL")
        return known


def _public_names() -> dict[int, str]:
    """Map the identity of functions to their public names; torch.nn.functional comes before torch."""
    found: dict[int, str] = {}
    for prefix, module in _homes():
        for name in dir(module):
            function: Any = getattr(module, name, None)
            if callable(function) and not isinstance(function, type) and not name.startswith("__"):
                found.setdefault(id(function), f"{prefix}.{name}")
    return found


def _homes() -> list[tuple[str, Any]]:
    homes: list[tuple[str, Any]] = [("Functional", torch.nn.functional), ("Torch", torch.linalg), ("Torch", torch.fft)]
    homes += [("Torch", torch.special), ("VF", _RecurrentFunctions), ("Torch", torch)]
    npu_functions = torch_npu()
    if npu_functions is not None:
        homes.insert(0, ("NPU", npu_functions))
    return homes


class _RecurrentFunctions:
    """Operations of recurrent layers, which torch calls through torch._VF."""

    lstm, gru, rnn_tanh, rnn_relu = torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu
    lstm_cell, gru_cell = torch.lstm_cell, torch.gru_cell
    rnn_tanh_cell, rnn_relu_cell = torch.rnn_tanh_cell, torch.rnn_relu_cell


def _wrappers() -> set[CodeType]:
    functional: Any = importlib.import_module("torch.nn.functional")
    found: list[Callable[[Tensor], Tensor]] = [functional.sigmoid, functional.tanh]
    return {function.__code__ for function in found}
