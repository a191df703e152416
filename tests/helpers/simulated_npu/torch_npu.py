"""`torch_npu` of the simulated accelerator: versions, formats, and the overflow flag."""

import types

import torch

ops = torch.ops.simulated_npu
npu = torch.npu
__version__ = f"{torch.__version__.partition('+')[0]}.simulated"

ND, NZ = 2, 29
_formats = {}


def _key(tensor):
    return tensor.untyped_storage().data_ptr()


def get_npu_format(tensor):
    """Return the format: private ones are those of tensors that `npu_format_cast` made."""
    return _formats.get(_key(tensor), ND)


def npu_format_cast(tensor, acl_format):
    """Return a copy in another format. In a private one the elements lie backwards, so that reading them in place
    gives other values at other places."""
    plain = tensor.flip(tuple(range(tensor.dim()))) if get_npu_format(tensor) != ND else tensor.clone()
    if acl_format == ND:
        return plain
    made = plain.flip(tuple(range(plain.dim()))).clone()
    _formats[_key(made)] = acl_format
    return made


def _get_npu_overflow_flag():
    if not ops.saturates():
        raise RuntimeError("Unsupported api when soc_version >= Ascend910B1, please use npu_check_overflow")
    return ops.overflowed()


def _clear_npu_overflow_flag():
    if ops.saturates():
        ops.clear_overflow()


def npu_get_float_status(self, mode=0):
    """Return eight numbers, the first of which tells; the host does not wait for them."""
    return torch.full((8,), float(ops.overflow_seen()), device=self.device)


def npu_clear_float_status(self, mode=0):
    """Clear the flag."""
    _clear_npu_overflow_flag()
    return torch.zeros(8, device=self.device)


npu.utils = types.SimpleNamespace(
    is_support_inf_nan=lambda: not ops.saturates(),
    get_npu_overflow_flag=_get_npu_overflow_flag,
    clear_npu_overflow_flag=_clear_npu_overflow_flag,
    get_cann_version=lambda module="CANN": "simulated" if module == "CANN" else "",
)
