"""Dumps to check, recorded with torch."""

from debugged import Encoder, debug
from dump_checks import call, check, tables, tensor, write_dump

__all__ = ["call", "check", "dumped", "tables", "tensor", "write_dump"]


def dumped(folder, kind=Encoder, **config):
    """Record one step of a model; return the folder of its dump."""
    debug(folder, kind=kind, **{"level": "L1", **config})
    return folder / "dump" / "step0" / "rank0"
