"""Applies the user's patterns to the names of modules and parameters."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate


@dataclass(frozen=True)
class Selection:
    """The selected names, and the patterns that matched nothing."""

    modules: frozenset[str]
    parameters: frozenset[str]
    unmatched: tuple[str, ...]


def select(patterns: Sequence[str], modules: Iterable[str], parameters: Iterable[str]) -> Selection:
    """Apply shell-style patterns to module and parameter names.

    A pattern that matches a module also selects its sub-modules and parameters; only `*` matches the root.

    >>> sorted(select(["layers.0"], ["", "layers", "layers.0", "layers.0.fc"], ["layers.0.fc.weight"]).modules)
    ['layers.0', 'layers.0.fc']
    """
    modules, parameters = list(modules), list(parameters)
    if "*" in patterns:
        return Selection(frozenset(modules), frozenset(parameters), ())
    chosen_modules: set[str] = set()
    chosen_parameters: set[str] = set()
    unmatched = []
    for pattern in patterns:
        match = re.compile(translate(pattern)).match
        direct = [name for name in modules if name and match(name)]
        roots = tuple(name + "." for name in direct)
        found_modules = {name for name in modules if name in direct or name.startswith(roots)}
        found_parameters = {name for name in parameters if match(name) or name.startswith(roots)}
        if not found_modules and not found_parameters:
            unmatched.append(pattern)
        chosen_modules |= found_modules
        chosen_parameters |= found_parameters
    return Selection(frozenset(chosen_modules), frozenset(chosen_parameters), tuple(unmatched))


def checked_targets(
    targets: Mapping[str, Sequence[str]], modules: Sequence[str], parameters: Sequence[str], kind: str = "module"
) -> dict[str, Selection]:
    """Return each part's selection; `kind` is the framework's word for modules, for the error message.

    Raises:
        ValueError: when a pattern matches nothing.

    """
    selections: dict[str, Selection] = {}
    known: dict[tuple[str, ...], Selection] = {}  # parts with the same patterns share one: a megabyte for 5,000 layers
    for part, patterns in targets.items():
        key = tuple(patterns)
        if key not in known:
            known[key] = select(patterns, modules, parameters)
        selection = selections[part] = known[key]
        if selection.unmatched:
            examples = ", ".join(repr(n) for n in [*modules[1:4], *parameters[:2]])
            raise ValueError(
                f"collect.{part}.targets: {selection.unmatched[0]!r} matches no {kind} and no parameter; "
                f"allowed: shell-style patterns over names such as {examples}"
            )
    return selections
