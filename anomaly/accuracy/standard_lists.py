"""Which standard of msprobe judges which call.

Source: the lists of the manual and of `api_precision_standard.yaml` in msprobe 1.x and 26.2. 26.2 still has the lists,
but compares every float output with a benchmark; here the lists hold.
"""

from typing import Final

BINARY: Final = "binary"
ABSOLUTE: Final = "absolute threshold"
ULP: Final = "ulp"
THOUSANDTH: Final = "thousandth"
BENCHMARK: Final = "benchmark"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LISTS: Final = {
    ABSOLUTE: _names(
        """__add__ __div__ __iadd__ __idiv__ __imul__ __isub__ __itruediv__ __mul__ __radd__ __rmul__ __sub__
        __truediv__ add add_ div div_ divide divide_ leaky_relu leaky_relu_ mul mul_ prelu reciprocal reciprocal_ rsqrt
        rsqrt_ rsub square square_ sub sub_"""
    ),
    BINARY: _names(
        """abs abs_ absolute absolute_ argmin bitwise_and bitwise_and_ broadcast_to ceil ceil_ equal fill_ flatten floor
        floor_ gather greater greater_ greater_equal greater_equal_ histc isfinite isnan less less_ less_equal
        less_equal_ logical_and logical_and_ logical_not logical_not_ logical_or logical_or_ masked_fill masked_fill_
        max_pool3d maximum minimum ne neg neg_ nonzero not_equal not_equal_ one_hot pad relu reshape round round_ select
        sign sign_ sort tile topk transpose transpose_ tril tril_ triu triu_ type_as"""
    ),
    ULP: _names(
        """__matmul__ addbmm addbmm_ addmm addmm_ baddbmm baddbmm_ bilinear bmm chain_matmul hspmm linear matmul mm mv
        smm sspaddmm"""
    ),
    THOUSANDTH: _names("conv1d conv2d"),
}
"""Names of calls without prefix and number. `__truediv__` and `__itruediv__` stand for msprobe's `__div__`, `__idiv__`,
which Python 3 never calls."""

_ADDING_BACKWARD: Final = _names("broadcast_to gather max_pool3d pad prelu tile")
"""Listed calls whose backward pass adds up elements; its results are not those of one rounding."""

LEVELS: Final = {
    "L1": _names("embedding npu_fusion_attention npu_fusion_attention_grad scatter_ scatter_add_"),
    "L2": _names(
        """addmm gelu index layer_norm matmul mm nonzero npu_cross_entropy_loss npu_cross_entropy_loss_backward
        npu_rms_norm npu_rms_norm_backward one_hot sum"""
    ),
}
"""Calls that the benchmark comparison asks more of. Source: `standard_config.py` of msprobe 26.2 (`GELU` there)."""


def standard_of(operation: str, *, backward: bool, adds: bool, dtype: str) -> str:
    """Return the standard for an output of a call, such as `relu`.

    `adds` says that the output of a backward pass is smaller than the gradient it comes from, as for a broadcast input:
    it is a sum, which no list was made for. bfloat16 misses the thousandth by its rounding alone (2⁻⁸), and complex
    numbers the binary standard: their absolute value is a rounded root.

    >>> standard_of("relu", backward=False, adds=False, dtype="torch.float32")
    'binary'
    >>> standard_of("__add__", backward=True, adds=True, dtype="torch.float32")
    'benchmark'
    """
    found = next((name for name, calls in _LISTS.items() if operation in calls), BENCHMARK)
    if backward and found in (BINARY, ABSOLUTE) and (adds or operation in _ADDING_BACKWARD):
        return BENCHMARK
    if found == BINARY and dtype.startswith("torch.complex"):
        return BENCHMARK
    return BENCHMARK if found == THOUSANDTH and dtype == "torch.bfloat16" else found


def level_of(operation: str) -> str:
    """Return L0, L1 or L2: how much the benchmark comparison asks of a call."""
    return next((level for level, calls in LEVELS.items() if operation in calls), "L0")
