"""Warm-up and decay: nothing is wrong."""

from case import Case, Expect

CASE = Case("B1", "warm-up and decay", Expect(silent=True))
