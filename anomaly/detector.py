"""The properties of a rule that the general code uses on its anomalies."""

from typing import ClassVar, Protocol

from trainsentry.anomaly.anomaly import Anomaly


class Detector(Protocol):
    """A rule, of one rank or across ranks: its name in files, its sentence, and how its anomalies are treated.

    `name` is the `detector` of its anomalies. `compares_ranks`: it needs the records of several ranks, so the tables of
    one rank cannot reproduce its anomalies. `leaves_ties`: where `value` equals `expected`, its anomalies name every
    rank of a tie. `settles_ties`: its anomalies show which rank of such a tie is at fault.
    """

    name: ClassVar[str]
    compares_ranks: ClassVar[bool] = False
    leaves_ties: ClassVar[bool] = False
    settles_ties: ClassVar[bool] = False

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str, /) -> str:
        """Return a sentence on the fault, with its step and number; `subject` names the series in words."""
        ...
