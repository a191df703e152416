"""Runs scripts in processes of their own, forked by one that has imported what they import: several seconds, once."""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

_PARENT = """
import json, os, sys
import torch._dynamo, trainsentry.collectors.torch.watch, trainsentry.monitor.trainer.wiring
{imports}
_ended = {{}}
for _name, _script in json.load(sys.stdin).items():
    _child = os.fork()
    if _child == 0:
        break
    _ended[_name] = os.waitstatus_to_exitcode(os.waitpid(_child, 0)[1])
else:
    print(json.dumps(_ended))
    sys.exit()
for _number, _path in (1, "stdout"), (2, "stderr"):
    _file = os.open(os.path.join(_script["told"], _name + "." + _path), os.O_WRONLY | os.O_CREAT)
    os.dup2(_file, _number)
    os.close(_file)
os.chdir(_script["folder"])
sys.argv = ["-c", *_script["arguments"]]
exec(_script["code"])  # in __main__; the interpreter then ends as after `python -c`
"""


@dataclass
class Script:
    """A script as for `python -c`, its arguments, and the folder that it runs in."""

    code: str
    arguments: list = field(default_factory=list)
    folder: Path = Path("/")


@dataclass
class Ended:
    """How a script ended, and what it said."""

    returncode: int
    stdout: str
    stderr: str


def run_forked(scripts, told, imports=""):
    """Run scripts by name, one after the other; return how each ended. What they say goes through a folder."""
    tasks = {
        name: {"code": s.code, "arguments": [str(a) for a in s.arguments], "folder": str(s.folder), "told": str(told)}
        for name, s in scripts.items()
    }
    command = [sys.executable, "-c", _PARENT.format(imports=imports)]
    done = subprocess.run(command, input=json.dumps(tasks), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    codes = json.loads(done.stdout)
    return {
        name: Ended(codes[name], *((told / f"{name}.{stream}").read_text() for stream in ("stdout", "stderr")))
        for name in scripts
    }
