"""The digest of a run: verdict, evidence and pointers in a few kilobytes, for tickets, scripts and language models."""

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict

FORMAT: Final = "trainsentry-digest-1"
"""It changes when a field is removed or changes its meaning, not when one is added."""

Status = Literal["incidents", "clean", "no_steps"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class DigestVerdict(_Part):
    """What to know first."""

    status: Status
    """`incidents`: something is wrong; `clean`: nothing was found; `no_steps`: nothing could be judged."""
    sentence: str
    """The verdict in words."""
    incidents: int
    """Number of incidents."""
    critical: int
    """Number of incidents whose severity is critical."""
    earliest_step: int | None
    """First step of the earliest incident."""


class DigestRun(_Part):
    """The run and how it stands."""

    directory: str
    state: Literal["running", "finished", "stopped", "crashed", "unknown"]
    why: str | None
    """Why it stopped or crashed, where that is known."""
    framework: str | None
    accelerator: str | None
    ranks: int
    """Ranks that have written something."""
    last_step: int | None
    """The last step that was recorded on any rank."""
    started: float | None
    """Start, in seconds since the epoch."""
    updated: float | None
    """Newest status of a rank, in seconds since the epoch."""
    step_seconds: float | None
    """Usual seconds of a step: the median of the newest steps of the slowest rank."""


class DigestSuspect(_Part):
    """A candidate for the cause."""

    rank: int
    name: str
    """Name of the parameter, module tensor or scalar."""
    quantity: str
    statistic: str | None
    kind: str | None
    step: int | None
    """First abnormal step of this series."""
    score: float | None
    evidence: str | None
    """The evidence as a sentence."""


class AbnormalValue(_Part):
    """One abnormal value; null stands for a value that is not finite."""

    step: int
    rank: int
    name: str
    quantity: str
    statistic: str | None
    value: float | None
    usual: float | None


class DigestIncident(_Part):
    """An incident; `rank`, `name` and `quantity` are its first suspect's."""

    id: int | None
    severity: str | None
    kind: str | None
    rank: int | None
    name: str | None
    quantity: str | None
    statistic: str | None
    first_step: int | None
    last_step: int | None
    sentence: str
    suspects: list[DigestSuspect]
    """The most likely cause first."""
    first_values: list[AbnormalValue]
    """The first abnormal value of each series on the first suspect's rank, in the order of the suspects."""
    repeats: list[int]
    """First steps of further incidents of the same first suspect."""
    actions: list[str]
    """What the monitor did."""


class DigestScalar(_Part):
    """A logged scalar over the recorded steps; null stands for a value that is not finite."""

    name: str
    first_step: int
    first: float | None
    last_step: int
    last: float | None
    lowest: float | None
    highest: float | None
    not_finite: int
    """Number of values that are NaN or Inf."""


class DigestRank(_Part):
    """A rank; ranks with trouble come first."""

    rank: int
    state: Literal["running", "finished", "stopped", "crashed", "unknown"]
    step: int | None
    anomalies: int | None
    overflow_steps: int | None
    skipped_steps: int | None
    """Steps that the loss scaler skipped."""
    troubles: list[str]
    """Parts of the monitor that have failed."""


class DigestMonitor(_Part):
    """The monitor itself: its cost, and whether it kept up."""

    cost_share: float | None
    """Time that the monitor adds, as a share of the training's own time, on the costliest rank."""
    lag_steps: int
    """Steps that the slowest recorder is behind the training."""
    lag_seconds: float
    gaps: list[str]
    """Steps that did not reach a file, with the reason."""


class Pointer(_Part):
    """Where to look next: a path below the run's directory, or a command."""

    what: str
    where: str


class Digest(_Part):
    """The digest of a run. Every field is always there; `incidents_left_out` and `ranks_left_out` count what is cut."""

    format: Literal["trainsentry-digest-1"]
    """The name of this format."""
    verdict: DigestVerdict
    run: DigestRun
    incidents: list[DigestIncident]
    """The worst first; several of one first suspect are one entry with `repeats`."""
    incidents_left_out: int
    scalars: list[DigestScalar]
    ranks: list[DigestRank]
    ranks_left_out: int
    monitor: DigestMonitor
    pointers: list[Pointer]


def schema() -> dict[str, Any]:
    """Return the JSON schema of a digest; `digest.schema.json` beside this file holds it."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Digest.model_json_schema(mode="serialization")}
