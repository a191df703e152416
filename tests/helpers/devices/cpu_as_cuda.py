"""Runs a library that knows CUDA alone on the CPU: what it makes on "cuda" is made in host memory."""

from torch import Tensor
from torch.overrides import TorchFunctionMode


class CpuAsCuda(TorchFunctionMode):
    """While active, `device="cuda"` means the CPU, and a CPU tensor's type has the name of CUDA's."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        result = function(*args, **kwargs)
        is_name = function is Tensor.type and isinstance(result, str)
        return result.replace("torch.", "torch.cuda.") if is_name else result
