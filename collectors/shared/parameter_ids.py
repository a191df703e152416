"""Ids of the series of parameters, looked up once."""

from typing import Any, Final

from trainsentry.collectors.series import GRADIENT, GRADIENT_UNREDUCED, PARAMETER, UPDATE, Series, SeriesTable


class ParameterIds:
    """Gives the quantities of parameters their series; a named parameter has `name`, `module` and `vpp_stage`."""

    def __init__(self, table: SeriesTable) -> None:
        self.table = table
        self._ids: dict[tuple[int, str, int, str], tuple[int, Any]] = {}
        self._state_ids: dict[tuple[int, tuple[Any, ...], int], tuple[list[int], Any]] = {}

    def id_of(self, named: Any, quantity: str, micro_step: int = 0, path: str = "") -> int:
        """Return the id of a quantity of a parameter; `path` tells apart the tensors that one key of state holds."""
        key = (id(named), quantity, micro_step, path)
        found = self._ids.get(key)
        if found is None:
            name = f"{named.name}.{path}" if path else named.name
            series = Series(name, quantity, micro_step, path, named.module, named.vpp_stage)
            found = self._ids[key] = (self.table.series_id(series), named)  # kept alive: its id is the key
        return found[0]

    def ids_of_state(self, named: Any, keys: tuple[Any, ...], micro_step: int = 0) -> list[int]:
        """Return the ids of the tensors that the optimizer's state holds under `keys`."""
        key = (id(named), keys, micro_step)
        found = self._state_ids.get(key)
        if found is None:
            ids = [self.id_of(named, state_quantity(k), micro_step) for k in keys]
            found = self._state_ids[key] = (ids, named)
        return found[0]

    def id_of_unreduced(self, named: Any, micro_step: int, holds: str) -> int:
        """Return the id of a gradient before reduction, of which `holds` says what it is the sum of."""
        key = (id(named), GRADIENT_UNREDUCED, micro_step, holds)
        found = self._ids.get(key)
        if found is None:
            series = Series(named.name, GRADIENT_UNREDUCED, micro_step, holds, named.module, named.vpp_stage)
            found = self._ids[key] = (self.table.series_id(series), named)
        return found[0]


_FIXED: Final = frozenset({GRADIENT, PARAMETER, UPDATE})


def state_quantity(key: Any) -> str:
    """Return the quantity of a state key; one that a fixed quantity already has gets a prefix."""
    return f"state_{key}" if key in _FIXED else str(key)
