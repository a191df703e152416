"""Runs code in a process with bounded memory, where a reader that needs too much fails."""

import subprocess
import sys

_LIMIT = """
import resource, sys
def limit(megabytes):
    held = int(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (held + (megabytes << 20),) * 2)
"""


def run_within(megabytes, imports, code, *arguments):
    """Run code that may take some megabytes beyond what its imports take; return what it printed."""
    text = f"{_LIMIT}\n{imports}\nlimit({megabytes})\n{code}"
    command = [sys.executable, "-c", text, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
