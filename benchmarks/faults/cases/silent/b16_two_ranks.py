"""Two ranks: nothing is wrong."""

from case import Case, Expect

CASE = Case("B16", "two ranks", Expect(silent=True), ranks=2)
