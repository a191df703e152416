"""Makes, once, a virtual environment with this project and the monitors that it is compared with."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv-peers"
PEERS = ["mindstudio-probe==26.2.0", "wandb==0.31.0"]


def peers_python() -> str:
    """Return the interpreter in TRAINSENTRY_PEERS, else that of an environment made on the first call."""
    given = os.environ.get("TRAINSENTRY_PEERS")
    if given:
        return given
    python = ENVIRONMENT / "bin" / "python"
    stamp = ENVIRONMENT / "made"
    if not stamp.exists():
        print(f"making {ENVIRONMENT.name} from PyPI …", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        constraints = ["--constraint", ROOT / "constraints.txt"]
        subprocess.run([*install, *constraints, *PEERS, "--editable", f"{ROOT}[torch]"], check=True)
        stamp.touch()
    return str(python)
