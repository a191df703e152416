"""`TrainerMon`: msprobe's monitor by its own calls and configuration, on top of `TrainMonitor`."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trainsentry.collectors.series import GRADIENT, Series
from trainsentry.exporters.files.json_files import replace_json
from trainsentry.monitor.config.files import parse_config, read_file
from trainsentry.monitor.config.schema import MonitorConfig
from trainsentry.monitor.control.config_file import ConfigFile
from trainsentry.monitor.errors import ConfigError
from trainsentry.monitor.frameworks import framework_of
from trainsentry.monitor.msprobe.first_keys import FirstConfig, read_first
from trainsentry.monitor.msprobe.metrics import Metrics, MsprobeMetrics
from trainsentry.monitor.msprobe.module_structure import module_structure
from trainsentry.monitor.msprobe.translation import translate, translate_first
from trainsentry.monitor.train_monitor import TrainMonitor

logger = logging.getLogger("trainsentry")

OUTPUT_DIR: Final = "MONITOR_OUTPUT_DIR"
"""The environment variable of msprobe's output folder; without it, `./monitor_output`."""

DYNAMIC: Final = "DYNAMIC_MONITOR"
"""The environment variable that has msprobe's monitor read its file again while the training runs."""

NOT_YET: Final = 2**53
"""The first sampled step while `dynamic_on` is false: none."""


class TrainerMon:
    """msprobe's first-generation monitor: reads its `monitor_config.json`, and writes its files.

    `process_group`, `params_have_main_grad` and `opt_ty` are accepted and not needed: ranks, main gradients and the
    kind of the optimizer are found. `monitor` is the `TrainMonitor` behind it, once `set_monitor` was called.

    Raises:
        ConfigError: for a file that cannot be read, or a value that msprobe does not allow.

    """

    def __init__(
        self, config_file_path: str, process_group: Any = None, params_have_main_grad: bool = True, opt_ty: Any = None
    ) -> None:
        del process_group, params_have_main_grad, opt_ty
        self.config_file_path = config_file_path
        data = read_file(Path(config_file_path))
        for difference in translate(data, config_file_path, files=True).differences:
            logger.info("trainsentry: %s: %s", config_file_path, difference)
        self.config = self._read(data)
        self._our_config(self.config, "pytorch")  # errors now, not in the training
        self.monitor: TrainMonitor | None = None
        self._metrics: MsprobeMetrics | None = None
        self._wrapped_optimizer: Any = None
        self._framework = "pytorch"
        self._is_on = False

    # ------------------------------------------------------------------ watching

    def set_monitor(
        self,
        model: Any,
        optimizer: Any = None,
        grad_acc_steps: Any = 1,
        tp_group: Any = None,
        dp_group: Any = None,
        start_iteration: int = 0,
    ) -> None:
        """Watch a model (or a list of chunks) and its optimizer.

        Both orders of the documentation are understood: `(model, optimizer, grad_acc_steps)` and
        `(model, grad_acc_steps, optimizer)`. `tp_group` and `dp_group` are not needed.

        Raises:
            TypeError, ValueError: as `TrainMonitor.watch` does.

        """
        del tp_group, dp_group
        if isinstance(optimizer, int) or (optimizer is None and not isinstance(grad_acc_steps, int)):
            optimizer, grad_acc_steps = grad_acc_steps, 1 if optimizer is None else optimizer
        optimizer = self._wrapped_optimizer if optimizer is None or isinstance(optimizer, int) else optimizer
        if self.monitor is None:
            self._framework = framework_of(model).describe_environment()["framework"]
            self.monitor = self._new_monitor(start_iteration)
            self._at_first_step(self.monitor)
        steps = grad_acc_steps if grad_acc_steps != 1 else None  # msprobe's default, which says nothing
        self.monitor.watch(model, optimizer, grad_acc_steps=steps, start_step=start_iteration)
        loop = self.monitor._loop
        if loop is not None:
            squash = self.config.squash_name
            self._metrics = MsprobeMetrics(
                loop,
                framework_of(model),
                self.config.ops or ["norm"],
                squash=squash,
                name=self._framework,
                eps=self.config.eps,
            )
            communication: Any = getattr(loop.watch, "communication", None)
            if self.config.cc_distribution.cc_log_only and communication is not None:
                communication.sites = {}

    def set_wrapped_optimizer(self, optimizer: Any) -> None:
        """Remember the optimizer for a call of `monitor_gnorm_with_ad` or `set_monitor` without one."""
        self._wrapped_optimizer = optimizer

    def monitor_gnorm_with_ad(
        self,
        model: Any,
        optimizer: Any = None,
        grad_acc_steps: Any = 1,
        tp_group: Any = None,
        dp_group: Any = None,
        start_iteration: int = 0,
    ) -> None:
        """Do the same as `set_monitor`, under its old name."""
        self.set_monitor(model, optimizer, grad_acc_steps, tp_group, dp_group, start_iteration)

    def reload_xy(self, xy_distribution: bool = False) -> None:
        """Switch activations on or off from one of the next steps on; call it on every rank."""
        logger.warning("trainsentry: reload_xy is deprecated; use trainsentry ctl, or edit the configuration file")
        self.config = self.config.model_copy(update={"xy_distribution": xy_distribution})
        loop = self.monitor._loop if self.monitor is not None else None
        if loop is not None:
            loop.control.request(self._our_config(self.config, self._framework))

    def close(self) -> None:
        """Write everything and remove every hook; this happens at the interpreter's exit anyway."""
        if self.monitor is not None:
            self.monitor.close()

    # ------------------------------------------------------------------ in memory

    def generate_wgrad_metrics(self, post_grad_dict: "Mapping[str, Any] | None" = None) -> tuple[Metrics, Metrics]:
        """Return the statistics of the gradients after and before their reduction, `{tag: {op: value}}` each.

        Between the backward pass and the next, these are the gradients that the parameters hold; else those of the
        newest recorded step. With `post_grad_dict`, `{tag: gradient}`, the first are the statistics of its tensors.
        """
        if self._metrics is None or not self.config.wg_distribution:
            return {}, {}
        if post_grad_dict is not None:
            names = list(post_grad_dict)
            measured = self._metrics.measured(
                [(Series(f"{i}", GRADIENT), post_grad_dict[n]) for i, n in enumerate(names)]
            )
            reduced = dict(zip(names, measured.values(), strict=False))
        else:
            reduced = self._metrics.gradients() or self._metrics.of(["grad_reduced"])[0]
        return reduced, self._metrics.of(["grad_unreduced"])[0]

    def generate_xy_metrics(self) -> tuple[Metrics, Metrics]:
        """Return the statistics of activations and of their gradients, of the current step or the newest one."""
        if self._metrics is None or not self.config.xy_distribution:
            return {}, {}
        activations, gradients = self._metrics.of(["actv", "actv_grad"])
        return activations, gradients

    def adhoc_check(
        self, target_tensor: Any, module_name: str, tensor_name: str, rank_list: "list[int]", ops_list: "list[str]"
    ) -> None:
        """Log statistics of a tensor (norm, max, min, mean) as scalars of this step, `<module>.<tensor>.<op>`."""
        loop = self.monitor._loop if self.monitor is not None else None
        if self.monitor is None or self._metrics is None or loop is None or (rank_list and loop.rank not in rank_list):
            return
        found = self._metrics.measured([(Series("", GRADIENT), target_tensor)])
        for numbers in found.values():
            chosen = {op: numbers[op] for op in ops_list if op in numbers}
            self.monitor.log(**{f"{module_name}.{tensor_name}.{op}": value for op, value in chosen.items()})

    # ------------------------------------------------------------------ pieces

    def _read(self, data: Any) -> FirstConfig:
        if not isinstance(data, Mapping) or isinstance(data.get("monitors"), Mapping):
            raise ConfigError(
                f"{self.config_file_path}: not a first-generation configuration; convert it with "
                "`trainsentry config convert` for TrainMonitor"
            )
        return read_first(data, self.config_file_path)[0]

    def _our_config(self, first: FirstConfig, framework: str) -> MonitorConfig:
        data = translate_first(first, files=True, framework=framework)
        data["output_dir"] = os.environ.get(OUTPUT_DIR) or "./monitor_output"
        return parse_config(data, self.config_file_path)

    def _new_monitor(self, start_iteration: int) -> TrainMonitor:
        """Return the monitor; with `DYNAMIC_MONITOR`, it begins and ends as `dynamic_on` and `collect_times` say."""
        if os.environ.get(DYNAMIC, "").lower() != "true":
            return TrainMonitor(self._our_config(self.config, self._framework))
        self._is_on = self.config.dynamic_on
        begin = start_iteration + 1 if self._is_on else NOT_YET
        first = self.config.model_copy(update={"start_step": begin})
        monitor = TrainMonitor(self._our_config(first, self._framework))
        monitor.config_file = ConfigFile(Path(self.config_file_path), self._changed)
        monitor.on_step(lambda step: self._switch_off(monitor, step))
        return monitor

    def _changed(self, path: Path, step: int) -> MonitorConfig | None:
        """Return our configuration for a file that was changed, to begin at `step`; None without `dynamic_on`."""
        found = self._read(read_file(path))
        if not found.dynamic_on:
            return None
        self._is_on = True
        return self._our_config(found.model_copy(update={"start_step": step}), self._framework)

    def _switch_off(self, monitor: TrainMonitor, step: int) -> None:
        """Set `dynamic_on` to false in the file after `collect_times` steps, on the rank that reads it."""
        loop = monitor._loop
        if loop is None or not self._is_on or not loop.control.reads:
            return
        if loop.schedule.stop is not None and step + 1 >= loop.schedule.stop:
            self._is_on = False
            path = Path(self.config_file_path)
            data = read_file(path)
            if path.suffix == ".json" and isinstance(data, dict):
                replace_json(path, {**data, "dynamic_on": False})

    def _at_first_step(self, monitor: TrainMonitor) -> None:
        """Have the structure or the operations written at the end of the first step, and the training stopped then."""
        done = False

        def report(step: int) -> None:
            nonlocal done
            del step
            if done or monitor._loop is None:
                return
            done = True
            reasons = []
            if self.config.print_struct:
                reasons.append(f"print_struct: the modules stand in {self._write_structure(monitor)}")
            if self.config.cc_distribution.cc_log_only:
                sites = getattr(monitor._loop.watch, "communication", None)
                lines = {
                    op: sorted(map(list, lines)) for op, lines in (sites.sites if sites is not None else {}).items()
                }
                logger.warning("trainsentry: communication operations and their lines: %s", json.dumps(lines))
                reasons.append("cc_log_only: the operations and their lines are in the log")
            monitor.request_stop("; ".join(reasons))

        if self.config.print_struct or self.config.cc_distribution.cc_log_only:
            monitor.on_step(report)

    def _write_structure(self, monitor: TrainMonitor) -> Path:
        loop = monitor._loop
        assert loop is not None
        path = Path(monitor.config.output_dir) / "module_struct" / f"rank{loop.rank}" / "module_struct.json"
        replace_json(path, module_structure(monitor._arrived(), monitor._table, self._framework))
        return path
