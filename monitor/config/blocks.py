"""The parts of the configuration's blocks: their base class, and types for values with units."""

import re
from pathlib import PurePath
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_UNITS = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}


class Block(BaseModel):
    """A part of the configuration; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _block(value: Any) -> Any:
    if value is True:
        return {}
    return None if value is False else value


def parse_size(value: Any) -> Any:
    """Return the bytes of a size such as "1GiB"; numbers are bytes already.

    Raises:
        ValueError: for a unit that is not known.

    >>> parse_size("16MiB")
    16777216
    """
    if not isinstance(value, str):
        return value  # a number of bytes
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or (match[2] or "B") not in _UNITS:
        raise ValueError(f"allowed: a number of bytes, or a number with one of {', '.join(_UNITS)}")
    return int(float(match[1]) * _UNITS[match[2] or "B"])


def as_list(value: Any) -> Any:
    """Return a tuple as a list, anything else as it is."""
    return list(value) if isinstance(value, tuple) else value


def as_text(value: Any) -> Any:
    """Return a path as text, anything else as it is."""
    return str(value) if isinstance(value, PurePath) else value


Size = Annotated[int, BeforeValidator(parse_size, json_schema_input_type=int | str), Field(gt=0)]
Every = Annotated[int, Field(ge=1, description="Sample the steps that this number divides.")]
Targets = Annotated[
    list[str],
    BeforeValidator(as_list, json_schema_input_type=list[str]),
    Field(min_length=1, description="Shell-style patterns over module and parameter names."),
]


def optional(block: type[Block]) -> BeforeValidator:
    """Return a validator that lets a block be `true` (its defaults) or `false` (off)."""
    return BeforeValidator(_block, json_schema_input_type=bool | block)


def all_of(block: type[Block]) -> BeforeValidator:
    """Return a validator that lets a block of blocks be `true` (its defaults) or `false` (each of them off)."""

    def parts(value: Any) -> Any:
        if value is not False:
            return {} if value is True else value
        return {name: False for name, field in block.model_fields.items() if field.annotation is not float}

    return BeforeValidator(parts, json_schema_input_type=bool | block)
