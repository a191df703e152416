"""The rules that run, in their order; one line each."""

from typing import Final

from trainsentry.anomaly.across_ranks.common_numbers import CommonNumbersRule
from trainsentry.anomaly.across_ranks.conservation import ConservationRule
from trainsentry.anomaly.across_ranks.hang import HangRule
from trainsentry.anomaly.across_ranks.peers import CallOrderRule, PeerRule
from trainsentry.anomaly.across_ranks.reductions import ReductionRule
from trainsentry.anomaly.across_ranks.replicas import ReplicaRule
from trainsentry.anomaly.anomaly import Detector
from trainsentry.anomaly.checkpoints.rule import CheckpointRule
from trainsentry.anomaly.rules.buffers.buffer_writes import BufferWritesRule
from trainsentry.anomaly.rules.buffers.constant_buffer import ConstantBufferRule
from trainsentry.anomaly.rules.buffers.negative_variance import NegativeVarianceRule
from trainsentry.anomaly.rules.buffers.resting_copies import RestingCopiesRule
from trainsentry.anomaly.rules.buffers.stopped_writes import StoppedWritesRule
from trainsentry.anomaly.rules.clamped import ClampedRule
from trainsentry.anomaly.rules.data.batch_rows import BatchRowsRule
from trainsentry.anomaly.rules.data.constant_data import ConstantDataRule
from trainsentry.anomaly.rules.data.input_drift import InputDriftRule
from trainsentry.anomaly.rules.data.missing_input import MissingInputRule
from trainsentry.anomaly.rules.data.repeated_data import RepeatedDataRule
from trainsentry.anomaly.rules.data.repeated_micro_batch import RepeatedMicroBatchRule
from trainsentry.anomaly.rules.data.repeated_random import RepeatedRandomRule
from trainsentry.anomaly.rules.data.repeated_samples import RepeatedSamplesRule
from trainsentry.anomaly.rules.dtype_change import DtypeChangeRule
from trainsentry.anomaly.rules.dtype_edge import DtypeEdgeRule
from trainsentry.anomaly.rules.equal_weights import EqualWeightsRule
from trainsentry.anomaly.rules.gradients.changed_gradient import ChangedGradientRule
from trainsentry.anomaly.rules.gradients.euler_gap import EulerGapRule
from trainsentry.anomaly.rules.gradients.gradient_gain import GradientGainRule
from trainsentry.anomaly.rules.gradients.gradient_scale import GradientScaleRule
from trainsentry.anomaly.rules.gradients.gradient_sums import GradientSumsRule
from trainsentry.anomaly.rules.gradients.lost_gradient import LostGradientRule
from trainsentry.anomaly.rules.gradients.new_gradient import NewGradientRule
from trainsentry.anomaly.rules.gradients.rows_without_gradient import RowsWithoutGradientRule
from trainsentry.anomaly.rules.gradients.zero_gradient import ZeroGradientRule
from trainsentry.anomaly.rules.layer_outliers import LayerOutlierRule
from trainsentry.anomaly.rules.mode_change import ModeChangeRule
from trainsentry.anomaly.rules.module_setting import ModuleSettingRule
from trainsentry.anomaly.rules.nonfinite import NonfiniteRule
from trainsentry.anomaly.rules.operations import OperationsRule
from trainsentry.anomaly.rules.optimizer.direction import DirectionRule
from trainsentry.anomaly.rules.optimizer.displacement import DisplacementRule
from trainsentry.anomaly.rules.optimizer.frozen import FrozenRule
from trainsentry.anomaly.rules.optimizer.gradient_writes import GradientWritesRule
from trainsentry.anomaly.rules.optimizer.learning_rate import LearningRateRule
from trainsentry.anomaly.rules.optimizer.linear_update import LinearUpdateRule
from trainsentry.anomaly.rules.optimizer.loss_scale import LossScaleRule
from trainsentry.anomaly.rules.optimizer.lost_state import LostStateRule
from trainsentry.anomaly.rules.optimizer.norm_recurrence import NormRecurrenceRule
from trainsentry.anomaly.rules.optimizer.options import OptionRule
from trainsentry.anomaly.rules.optimizer.recurrence import RecurrenceRule
from trainsentry.anomaly.rules.optimizer.state_extremes import StateExtremesRule
from trainsentry.anomaly.rules.optimizer.state_reset import StateResetRule
from trainsentry.anomaly.rules.optimizer.weight_continuity import WeightContinuityRule
from trainsentry.anomaly.rules.precision import PrecisionRule
from trainsentry.anomaly.rules.repeated_call import RepeatedCallRule
from trainsentry.anomaly.rules.repeated_zeros import RepeatedZerosRule
from trainsentry.anomaly.rules.rule import Rule
from trainsentry.anomaly.rules.scalars.logged_numbers import LoggedNumbersRule
from trainsentry.anomaly.rules.scalars.loss_above_start import LossAboveStartRule
from trainsentry.anomaly.rules.stale import StaleRule
from trainsentry.anomaly.rules.zero_pattern import ZeroPatternRule
from trainsentry.anomaly.rules.zeroed_weights import ZeroedWeightsRule

_RULES: Final[list[type[Rule]]] = [
    FrozenRule,
    WeightContinuityRule,
    DisplacementRule,
    EqualWeightsRule,
    ZeroedWeightsRule,
    RecurrenceRule,
    NormRecurrenceRule,
    StateExtremesRule,
    LinearUpdateRule,
    DirectionRule,
    StateResetRule,
    LostStateRule,
    ModeChangeRule,
    ModuleSettingRule,
    OperationsRule,
    DtypeChangeRule,
    PrecisionRule,
    LearningRateRule,
    OptionRule,
    GradientWritesRule,
    ChangedGradientRule,
    GradientScaleRule,
    GradientSumsRule,
    EulerGapRule,
    GradientGainRule,
    LostGradientRule,
    NewGradientRule,
    ZeroGradientRule,
    RowsWithoutGradientRule,
    LossScaleRule,
    LayerOutlierRule,
    MissingInputRule,
    RepeatedDataRule,
    RepeatedMicroBatchRule,
    RepeatedSamplesRule,
    LossAboveStartRule,
    LoggedNumbersRule,
    ConstantDataRule,
    InputDriftRule,
    ConstantBufferRule,
    BufferWritesRule,
    StoppedWritesRule,
    RestingCopiesRule,
    StaleRule,
    ZeroPatternRule,
    ClampedRule,
    RepeatedCallRule,
    RepeatedZerosRule,
    RepeatedRandomRule,
    NegativeVarianceRule,
    NonfiniteRule,
    DtypeEdgeRule,
]
"""Rules over the records of one rank, in the order in which they judge."""

_ACROSS_RANKS: Final[list[type[Detector]]] = [
    ReplicaRule,
    ConservationRule,
    ReductionRule,
    PeerRule,
    CommonNumbersRule,
    CallOrderRule,
    HangRule,
    CheckpointRule,
    BatchRowsRule,
]
"""Rules over the records of several ranks, or over what no record has: they are not run with each record."""


_BY_NAME: Final[dict[str, type[Detector]]] = {d.name: d for d in (*_RULES, *_ACROSS_RANKS)}


def rules() -> tuple[type[Rule], ...]:
    """Return the rules over the records of one rank, in the order in which they judge."""
    return tuple(_RULES)


def detectors() -> tuple[type[Detector], ...]:
    """Return every rule: those of one rank, then those across ranks."""
    return (*_RULES, *_ACROSS_RANKS)


def detector(name: str) -> type[Detector] | None:
    """Return the rule of that name; None for the baselines' own detectors, and for those of users."""
    return _BY_NAME.get(name)


def speaker_for(kind: str) -> type[Detector] | None:
    """Return the rule whose sentence tells of a kind, for detectors that are only functions."""
    return next((d for d in detectors() if d.speaks_for == kind), None)


def register(rule: type[Rule]) -> None:
    """Add a rule: every `Detection` made from now on runs it, after the others.

    Raises:
        ValueError: when another rule has its name, or its key in the checkpoint.

    """
    known = detector(rule.name)
    if known is not None:
        raise ValueError(f"{rule.__name__}.name: {rule.name!r} is taken by {known.__name__}; choose another name")
    for other in _RULES:
        if rule.state_key is not None and other.state_key == rule.state_key:
            raise ValueError(
                f"{rule.__name__}.state_key: {rule.state_key!r} is taken by {other.__name__}; choose another key"
            )
    _RULES.append(rule)
    _BY_NAME[rule.name] = rule


def unregister(rule: type[Rule]) -> None:
    """Take back `register`.

    Raises:
        ValueError: when the rule is not registered.

    """
    _RULES.remove(rule)
    del _BY_NAME[rule.name]
