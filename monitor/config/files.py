"""Reads a configuration from a file or mapping. Errors name the key, the value and the allowed values."""

import difflib
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, get_args

from pydantic import BaseModel, BeforeValidator, ValidationError

from trainsentry.exporters.files.foreign_files import MAX_DEPTH, is_deep, parse_json, read_bytes
from trainsentry.monitor.config.msprobe_keys import msprobe_advice
from trainsentry.monitor.config.schema import MonitorConfig, config_model
from trainsentry.monitor.errors import ConfigError

_TYPE_NAMES = {"int", "str", "bool", "float", "dict"}

LARGEST_FILE: Final = 1 << 20
"""Bytes of the largest configuration file; one with every key and a thousand patterns has some ten thousand."""

MOST_ITEMS: Final = 100_000
"""Items of a configuration at most; an alias of YAML counts as all the items that it stands for."""

LONGEST_SHOWN: Final = 200
"""Characters of a wrong value that an error shows."""

CLOSE: Final = 0.6
"""Likeness (0 to 1) of a known key to an unknown one from which on it is suggested; below it only confuses."""

SUFFIXES = (".json", ".yaml", ".yml", ".toml")

_PLAIN: Final = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "string": "a text",
    "list": "a list",
}
"""What is allowed, by the beginning of the type of pydantic's error."""


def load_config(source: "str | Path | Mapping[str, Any] | MonitorConfig | None") -> MonitorConfig:
    """Return the configuration that `source` describes; None means the defaults.

    Raises:
        ConfigError: when the file cannot be read, or for a key or value that is not allowed.

    """
    if source is None:
        return config_model()()
    if isinstance(source, MonitorConfig):
        return source
    if isinstance(source, (str, Path)):
        return parse_config(read_file(Path(source)), str(source))
    if isinstance(source, Mapping):
        return parse_config(dict(source), "configuration")
    raise ConfigError(
        f"configuration: got {type(source).__name__}, allowed: a path ({', '.join(SUFFIXES)}), a mapping, "
        "a MonitorConfig, or nothing"
    )


def read_file(path: Path) -> Any:
    """Return the content of a configuration file.

    Raises:
        ConfigError: when it is missing, has an unknown suffix, or is malformed.

    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{path}: suffix {path.suffix!r}, allowed: {', '.join(SUFFIXES)}")
    try:
        text = read_bytes(path, LARGEST_FILE).decode("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    try:
        found = _parsers()[path.suffix.lower()](text)
    except Exception as error:
        raise ConfigError(f"{path}: malformed: {error}") from error
    if is_deep(found, MOST_ITEMS):
        raise ConfigError(
            f"{path}: nested deeper than {MAX_DEPTH}, or more than {MOST_ITEMS} items with all its aliases"
        )
    return found


def parse_config(data: Any, where: str) -> MonitorConfig:
    """Return the configuration in `data`; `where` names its source in errors.

    Raises:
        ConfigError: for a key or value that is not allowed; it names every mistake.

    """
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: got {type(data).__name__}, allowed: an object with keys")
    model = config_model()
    try:
        return model.model_validate(data)
    except ValidationError as error:
        advice = msprobe_advice(data, where)
        if advice is not None:
            raise ConfigError(advice) from None
        lines = [explain(dict(e), model) for e in error.errors()]
        raise ConfigError(f"{where}: " + "\n  ".join(dict.fromkeys(lines))) from None


def _parsers() -> dict[str, Any]:
    def parse_yaml(text: str) -> Any:
        import yaml

        return yaml.safe_load(text) or {}

    def parse_toml(text: str) -> Any:
        toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
        return toml.loads(text)

    return {".json": parse_json, ".yaml": parse_yaml, ".yml": parse_yaml, ".toml": parse_toml}


def explain(error: dict[str, Any], model: type[BaseModel]) -> str:
    """Return the sentence for a mistake that pydantic found: the key, the value and the allowed values."""
    # Branches of a union appear in the location as their type's name; they are not keys of the user.
    path = [p for p in error["loc"] if isinstance(p, int) or (p.isidentifier() and p not in _TYPE_NAMES)]
    if error["type"] == "extra_forbidden" and (not path or path[-1] != error["loc"][-1]):
        path.append(error["loc"][-1])  # a key of the user's, whatever it looks like
    keys = [str(p) for p in path]
    if error["type"] == "extra_forbidden":
        allowed = _keys_at(path[:-1], model)
        close = difflib.get_close_matches(keys[-1], allowed, n=1, cutoff=CLOSE)
        nearest = f"; the closest known one is {close[0]!r}" if close else ""
        return f"{'.'.join(keys)}: unknown key{nearest}; allowed: {', '.join(allowed) or 'no keys'}"
    kind, _, wrong = error["type"].partition("_")
    message: str = error["msg"].removeprefix("Value error, ").replace("Input should be", "allowed:")
    if wrong in {"type", "parsing", "from_float"} and kind in _PLAIN:
        message = f"allowed: {_PLAIN[kind]}"
    elif error["type"] == "model_type":
        message = f"allowed: {_switches(path, model)}an object with some of the keys {', '.join(_keys_at(path, model))}"
    if not keys:
        return message
    return f"{'.'.join(keys)}: got {_shown(error['input'])}: {message}"


def _shown(value: Any) -> str:
    found = repr(value)
    return found if len(found) <= LONGEST_SHOWN else f"{found[:LONGEST_SHOWN]}…"


def _keys_at(path: list[Any], model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in _model_at(path, model).model_fields.items()]


def _switches(path: list[Any], model: type[BaseModel]) -> str:
    """Return the words for a block that may be switched on or off as a whole."""
    field = _model_at(path[:-1], model).model_fields.get(str(path[-1])) if path else None
    validators = [] if field is None else field.metadata
    return "true, false or " if any(isinstance(each, BeforeValidator) for each in validators) else ""


def _model_at(path: list[Any], model: type[BaseModel]) -> type[BaseModel]:
    for key in path:
        field = model.model_fields.get(str(key))
        candidates = (field.annotation, *get_args(field.annotation)) if field is not None else ()
        model = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), model)
    return model
