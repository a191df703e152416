"""The process that runs calls: it reads one request a line and answers each with one line.

It is a process of its own because a device fault, or memory that runs out, ends a process: the call is then lost, and
the check is not.
"""

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainsentry.collectors.calls.call_check import (
    CallChecks,
    DeviceRefusedError,
    NotComparableError,
    UnusableCallError,
)
from trainsentry.collectors.shared.adapted_torch import adapted_torch
from trainsentry.monitor.accuracy.judged_call import JudgedCall, failed, judge_call, left_out


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker needs to know: `folder` holds dumped tensors ("" for random ones), `errors` takes failed calls.

    `framework` is the dump's word for it: pytorch, mindspore or mindtorch. A request may name another folder for failed
    calls.
    """

    device: str
    folder: str
    seed: int
    rule: str
    errors: str
    framework: str = "pytorch"

    def as_argument(self) -> str:
        """Return the settings as an argument of a command line."""
        return json.dumps(asdict(self))


def make_checks(settings: WorkerSettings) -> CallChecks:
    """Return what runs calls in the framework of the dump.

    Raises:
        ValueError: for a device that the framework does not have.
        ImportError: when it is not installed.

    """
    try:
        kind = _kind_of_checks(settings.framework)
    except ImportError as error:
        raise ImportError(f"the dump holds calls of {settings.framework}: {error}") from None
    return kind(settings.device, Path(settings.folder) if settings.folder else None, settings.seed)


def _kind_of_checks(framework: str) -> Callable[[str, Path | None, int], CallChecks]:
    if framework == "pytorch":
        from trainsentry.collectors.torch.accuracy.checking import TorchChecks

        return TorchChecks
    if framework == "mindtorch":
        importlib.import_module("torch")
        if adapted_torch() is None:
            raise ValueError("the dump holds calls of mindtorch; allowed: where `import torch` is MSAdapter's")
    from trainsentry.collectors.mindspore.accuracy.checking import MindSporeChecks

    return MindSporeChecks


def check_call(checks: CallChecks, request: Mapping[str, Any], settings: WorkerSettings) -> JudgedCall:
    """Run and judge one call; whatever goes wrong with it is part of the result."""
    call = str(request["call"])
    try:
        checked = checks.check(call, request["forward"], request["backward"])
        judged = judge_call(call, checked, settings.rule)
    except NotComparableError as reason:
        return left_out(call, str(reason))
    except UnusableCallError as reason:
        return left_out(call, str(reason), unusable=True)
    except DeviceRefusedError as reason:
        return failed(call, f"the device refuses the call: {reason}")
    except Exception as error:  # noqa: BLE001 - one call's trouble must not end the check of the others
        return left_out(call, f"{type(error).__name__}: {error}".splitlines()[0], unusable=True)
    errors = request.get("errors", settings.errors)
    if errors and judged.status in ("error", "warning"):
        folder = Path(errors)
        folder.mkdir(parents=True, exist_ok=True)
        checked.save(call, folder)
    return judged


def main() -> None:
    """Answer requests until standard input ends; libraries that print do not reach the answers."""
    settings = WorkerSettings(**json.loads(sys.argv[1]))
    with contextlib.suppress(OSError):  # not Linux
        Path("/proc/self/oom_score_adj").write_text("1000")  # where memory runs out, the training is not what is ended
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    checks: CallChecks | None = None
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        for line in sys.stdin:
            request = json.loads(line)
            try:
                checks = checks or make_checks(settings)
                answer = check_call(checks, request, settings).as_json()
            except (ValueError, ImportError, OSError) as error:
                answer = {"fatal": f"{error}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
