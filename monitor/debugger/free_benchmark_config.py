"""The configuration of the task free_benchmark: msprobe's keys, and the combinations of them that have a meaning."""

from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from trainsentry.collectors.calls.free_benchmark import BenchmarkSettings
from trainsentry.monitor.config.blocks import Unit
from trainsentry.monitor.debugger.chosen_calls import ChosenCalls

MODES_ON_CPU: Final = ("to_cpu",)
MODES: Final = ("improve_precision", "add_noise", "bit_noise", "change_value", "no_change")
MODES_THAT_FIX: Final = ("improve_precision", "to_cpu")


class FreeBenchmarkBlock(ChosenCalls):
    """Settings of the task free_benchmark: how each operation is made again, and what becomes of its results."""

    fuzz_device: Literal["npu", "cpu", "cuda"] = Field(
        default="npu",
        description="Where a call is made again: on its own device (`npu` and `cuda` alike), or on the `cpu`, with "
        "pert_mode `to_cpu` alone.",
    )
    pert_mode: Literal["improve_precision", "add_noise", "bit_noise", "change_value", "no_change", "to_cpu"] = Field(
        default="improve_precision",
        description="What is changed: half precision becomes float32; the first floating-point input gets noise "
        "(`add_noise`), another last bit (`bit_noise`) or its first and last element exchanged (`change_value`); "
        "nothing (`no_change`, which finds calls that are not deterministic); the device (`to_cpu`).",
    )
    handler_type: Literal["check", "fix"] = Field(
        default="check",
        description="`check` writes inconsistent results to free_benchmark.csv; `fix` hands the new results to the "
        "training, with pert_mode `improve_precision` or `to_cpu`, fuzz_stage `forward` and no preheating.",
    )
    fuzz_level: Literal["L1"] = Field(default="L1", description="Operations; there is no other level.")
    fuzz_stage: Literal["forward", "backward"] = Field(default="forward", description="The pass that is compared.")
    if_preheat: bool = Field(
        default=False,
        description="Find the thresholds in the first `preheat_step` steps, by comparing with the CPU too.",
    )
    preheat_step: Annotated[int, Field(ge=1, description="Steps that find thresholds."), Unit("steps")] = 15
    max_sample: Annotated[
        int,
        Field(ge=1, description="Calls of an operation in a step that are compared with the CPU, while preheating."),
        Unit("calls"),
    ] = 20

    @model_validator(mode="after")
    def _has_a_meaning(self) -> Self:
        allowed = MODES_ON_CPU if self.fuzz_device == "cpu" else MODES
        if self.pert_mode not in allowed:
            raise ValueError(
                f"pert_mode: {self.pert_mode!r} with fuzz_device {self.fuzz_device!r}; allowed: {', '.join(allowed)}"
            )
        if self.handler_type == "fix" and self.pert_mode not in MODES_THAT_FIX:
            raise ValueError(
                f"pert_mode: {self.pert_mode!r} with handler_type 'fix'; allowed: {', '.join(MODES_THAT_FIX)}, which "
                "make a result more exact"
            )
        if self.handler_type == "fix" and self.fuzz_stage != "forward":
            raise ValueError(f"fuzz_stage: {self.fuzz_stage!r} with handler_type 'fix'; allowed: forward")
        if self.if_preheat and (self.handler_type == "fix" or self.pert_mode in {"no_change", "to_cpu"}):
            raise ValueError(
                f"if_preheat: true with handler_type {self.handler_type!r} and pert_mode {self.pert_mode!r}; allowed: "
                "with handler_type check and a pert_mode that has a threshold (all but no_change and to_cpu)"
            )
        return self

    def settings(self, rank: int, folder: str) -> BenchmarkSettings:
        """Return the settings of a rank."""
        chosen: dict[str, Any] = {"mode": self.pert_mode, "stage": self.fuzz_stage, "preheats": self.if_preheat}
        return BenchmarkSettings(
            rank=rank,
            folder=Path(folder),
            fixes=self.handler_type == "fix",
            preheat_steps=self.preheat_step,
            max_samples=self.max_sample,
            **chosen,
        )
