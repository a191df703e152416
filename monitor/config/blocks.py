"""The base class of configuration blocks, and the types of values that carry a unit."""

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, Any, Final

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


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of a value, as metadata of its type: `Annotated[float, Unit("seconds")]`."""

    name: str


BYTES: Final = Unit("bytes")


class Block(BaseModel):
    """A part of the configuration. An unknown key is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _block(value: Any) -> Any:
    if value is True:
        return {}
    return None if value is False else value


def parse_size(value: Any) -> Any:
    """Return a size such as "1GiB" in bytes; a number is in bytes already.

    Raises:
        ValueError: for an unknown unit.

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
    """Return a tuple as a list, any other value unchanged."""
    return list(value) if isinstance(value, tuple) else value


def as_text(value: Any) -> Any:
    """Return a path as text, any other value unchanged."""
    return str(value) if isinstance(value, PurePath) else value


Size = Annotated[int, BeforeValidator(parse_size, json_schema_input_type=int | str), Field(gt=0), BYTES]
Every = Annotated[
    int,
    Field(ge=1, description="Sample the steps whose number is a multiple of this. Other steps cost nothing."),
    Unit("steps"),
]
Targets = Annotated[
    list[str],
    BeforeValidator(as_list, json_schema_input_type=list[str]),
    Field(
        min_length=1,
        description="Shell-style patterns over the names of modules and parameters. A module that matches brings its "
        "sub-modules and parameters along.",
    ),
]


def optional(block: type[Block]) -> BeforeValidator:
    """Return a validator that reads `true` as the defaults of `block` and `false` as off (None)."""
    return BeforeValidator(_block, json_schema_input_type=bool | block)


def all_of(block: type[Block]) -> BeforeValidator:
    """Return a validator that reads `true` as the defaults of `block` and `false` as every inner block off."""

    def parts(value: Any) -> Any:
        if value is not False:
            return {} if value is True else value
        return {name: False for name, field in block.model_fields.items() if field.annotation is not float}

    return BeforeValidator(parts, json_schema_input_type=bool | block)
