"""Changes inputs so that they stay JSON or CSV, because flipped bytes seldom get past the parser."""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, 0, -1, 2**31, 2**53 + 1, 2**64, 10**400, 1e308, float("nan"), float("inf"), "", "x", "[x]", "\x1b[2J",
    "\ud800", "\x00", "../../x", "nan", [], {}, [[]], [None], {"a": None}, [1, "b", {}], {"type": "slice", "value": 1},
)  # fmt: skip
"""Values of unexpected types and sizes."""

CELLS = (
    b"", b"-1", b"9" * 400, b"9223372036854775807", b"1e400", b"nan", b"inf", b'"', b'"a\nb"', b"[x]", b"\x1b[2J",
    b"\x00", b"\r", b"\xff\xfe", b"1_0", b"True", b"0.5", b"[9999999999, 9999999999]", b",", b"\n", b"01",
)  # fmt: skip

Mutate = Callable[[bytes, int], bytes]
"""The fuzzer's own mutator of bytes; takes the largest size of its result."""


def json_mutator(mutate: Mutate) -> Callable[[bytes, int, int], bytes]:
    """Return a mutator that inserts an odd value somewhere in JSON, or moves a part of it."""

    def change(data: bytes, most: int, seed: int) -> bytes:
        dice = random.Random(seed)
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return mutate(data, most)
        if dice.random() < 0.2 or not isinstance(value, (dict, list)):
            return mutate(data, most)
        for _ in range(dice.randint(1, 3)):
            _change_one(value, dice)
        text = json.dumps(value, indent=dice.choice((None, 1))).encode()
        return text if len(text) <= most else mutate(data, most)

    return change


def _change_one(value: Any, dice: random.Random) -> None:
    """Change one place below a list or object."""
    while isinstance(value, (dict, list)) and value:
        key = dice.choice(list(value) if isinstance(value, dict) else range(len(value)))
        inner = value[key]
        if not (isinstance(inner, (dict, list)) and inner) or dice.random() < 0.2:
            break
        value = inner
    else:
        return
    what = dice.random()
    if what < 0.7:
        value[key] = copy.deepcopy(dice.choice(ODD))
    elif what < 0.8 and isinstance(value, dict):
        value[str(dice.choice(ODD))] = value.pop(key)
    elif what < 0.9:
        del value[key]
    else:
        value[key] = [value[key], copy.deepcopy(value[key])]


def csv_mutator(mutate: Mutate) -> Callable[[bytes, int, int], bytes]:
    """Return a mutator that inserts an odd cell somewhere in a table, or moves a line."""

    def change(data: bytes, most: int, seed: int) -> bytes:
        dice = random.Random(seed)
        if dice.random() < 0.3:
            return mutate(data, most)
        lines = [line.split(b",") for line in data.split(b"\n")]
        for _ in range(dice.randint(1, 3)):
            line = dice.choice(lines)
            what = dice.random()
            if what < 0.6:
                line[dice.randrange(len(line))] = dice.choice(CELLS)
            elif what < 0.8:
                lines.insert(dice.randrange(len(lines) + 1), list(line))
            elif what < 0.9:
                line.insert(dice.randrange(len(line) + 1), dice.choice(CELLS))
            else:
                del line[dice.randrange(len(line))]
                line.extend([b""] * (not line))
        return b"\n".join(b",".join(line) for line in lines)[:most]

    return change
