"""A resumed run whose tensors, or settings, are not what its checkpoint saved."""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

from trainsentry.anomaly.anomaly import CHECKPOINT_MISMATCH, Anomaly, Detector
from trainsentry.anomaly.checkpoints.comparison import (
    DTYPE,
    MISSING,
    NEW,
    OTHER_RANK,
    STALE,
    SWAPPED,
    Mismatch,
    Resumed,
    mismatches,
)
from trainsentry.anomaly.checkpoints.setting_changes import TRAINING, SettingChange, setting_changes
from trainsentry.anomaly.finding import DATA
from trainsentry.anomaly.rules.module_setting import MODEL
from trainsentry.collectors.fingerprint import Key
from trainsentry.collectors.series import BUFFER, PARAMETER

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs, as bits that were saved do not change by themselves."""

ALL: Final = "all"
"""The name under which tensors of one kind are told of together."""

STATE: Final = "optimizer"
"""The quantity under which the optimizer's state is told of as a whole."""

TOGETHER: Final = 8
"""Mismatches of one kind, more than half of its tensors, from which on they are told of together: as many suspects as
an incident names."""

MOST: Final = 1_000
"""Tensors told of one by one, a bound on the message."""

_OF_SETTINGS: Final = frozenset({TRAINING, DATA, STATE})
"""Quantities of changed settings, whose words are a sentence."""

_KINDS: Final = {PARAMETER: "parameters", BUFFER: "buffers", STATE: "tensors of optimizer state"}


class CheckpointRule(Detector):
    """Makes anomalies of what a run has loaded and what its checkpoint saved, at the first step after a resume."""

    name: ClassVar[str] = "checkpoint"
    speaks_for: ClassVar[str | None] = CHECKPOINT_MISMATCH
    compares_ranks: ClassVar[bool] = True

    @staticmethod
    def judge(step: int, ranks: Mapping[int, Resumed]) -> list[Anomaly]:
        """Return settings and tensors that are not what was saved; where most of a kind are not, one anomaly for it."""
        found = mismatches(ranks)
        keys = {key for each in ranks.values() for key in (*each.saved.parts, *each.found)}
        saved_at = ranks[min(ranks)].saved.step
        told = [_setting(step, change) for change in setting_changes(ranks)]
        for kind in _KINDS:
            size = sum(_kind(key) == kind for key in keys)
            of_kind = [m for m in found if _kind(m.key) == kind]
            together = _together(of_kind, kind, size)
            told += [_anomaly(step, m.key, m.rank, m.words) for m in of_kind if m not in together]
            if together:
                told.append(_anomaly(step, (kind, ALL), together[0].rank, _words(together, kind, size, saved_at)))
        return told[:MOST]

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return which tensor is what instead of what was saved; the words are the anomaly's `statistic`."""
        if anomaly.quantity == BUFFER:
            subject = f"buffer {anomaly.name}"
        whole = anomaly.name == ALL or anomaly.quantity in _OF_SETTINGS
        said = anomaly.statistic if whole else f"{subject} {anomaly.statistic}"
        return f"{said} (resumed at step {anomaly.step})"


def _kind(key: Key) -> str:
    return key[0] if key[0] in _KINDS else STATE


def _together(found: Sequence[Mismatch], kind: str, size: int) -> list[Mismatch]:
    """Return the mismatches of one kind that are told of together, none where they are few; `size` tensors exist.

    All of a few buffers are named: a model may make them itself, as rotary frequencies, and saves none of them.
    """
    unexplained = [m for m in found if m.label not in {SWAPPED, OTHER_RANK}]
    tensors = len({m.key for m in unexplained})
    most = tensors >= TOGETHER and 2 * tensors > size
    return unexplained if most or (kind != BUFFER and 1 < tensors == size) else []


def _words(together: Sequence[Mismatch], kind: str, size: int, step: int) -> str:
    """Return a sentence on most or all tensors of one kind."""
    tensors, labels, words = len({m.key for m in together}), {m.label for m in together}, {m.words for m in together}
    everything, plural = tensors == size, _KINDS[kind]
    some = f"all {size} {plural}" if everything else f"{tensors} of the {size} {plural}"
    if labels == {MISSING}:
        return f"{some} that were saved at step {step} are missing"
    if labels == {NEW}:
        return f"{some} are new: the checkpoint of step {step} has nothing of them"
    if len(words) == 1 and labels <= {DTYPE, STALE}:
        alike = next(iter(words)).replace("is as it was", "are as they were")
        return f"{some} {alike.replace('has dtype', 'have dtype').replace('was saved', 'were saved')}"
    if everything:
        return (
            f"none of the {size} {plural} is what was saved at step {step}: another checkpoint was loaded, or all were "
            "converted"
        )
    return f"{some} are not what was saved at step {step}"


def _setting(step: int, change: SettingChange) -> Anomaly:
    return _anomaly(step, (change.quantity, change.names[0] or MODEL), change.rank, change.words)


def _anomaly(step: int, key: Key, rank: int, words: str) -> Anomaly:
    quantity, name = key
    return Anomaly(
        step=step,
        micro_step=0,
        rank=rank,
        order=0,
        name=name,
        quantity=quantity,
        statistic=words,
        value=math.nan,
        expected=math.nan,
        score=SCORE,
        detector=CheckpointRule.name,
        kind=CHECKPOINT_MISMATCH,
        module="" if name == ALL else name.rpartition(".")[0],
    )
