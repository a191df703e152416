"""A norm's gain changes its sign."""

from case import Case, Expect


def _harm(run):
    if run.at_fault:
        run.parameter("blocks.1.ln2.weight", "stages.1.norm.weight").data.neg_()  # torch counts no write


CASE = Case(
    "X01",
    "a norm's gain changes sign",
    Expect(("parameter",), ("spike", "shift"), {"gpt": ("blocks.1.ln2.weight",), "cnn": ("stages.1.norm.weight",)}),
    before_step=_harm,
)
