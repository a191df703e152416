"""Fuzzes every reader of files with atheris, guided by coverage, one reader after the other.

    python benchmarks/limits/fuzz_readers.py --seconds 600 [--only csv dump] [--keep FOLDER]

Each reader begins with small valid files, made on the spot. It stops at the first input that raises an error other
than the reader's own, takes longer than SLOW seconds, or more than MEGABYTES; the input is kept in the printed folder.
Needs `pip install 'trainsentry[fuzz]'`.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from fuzz_targets import TARGETS, seeds_of

SLOW = 10
"""Seconds allowed for one input: a reader needs milliseconds for inputs of kilobytes."""

MEGABYTES = 2048
"""MB of resident memory allowed for a reader; torch and pandas alone take about 400."""

LONGEST = 4096
"""Bytes of the longest input; the tests cover longer ones."""


def run_target(name: str, seconds: int, keep: Path) -> tuple[int, str]:
    """Fuzz one reader in a separate process; return the number of inputs tried, and the finding or "none"."""
    corpus = keep / name / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds_of(name)):
        (corpus / f"seed{number}").write_bytes(seed)
    limits = [f"-max_total_time={seconds}", f"-timeout={SLOW}", f"-rss_limit_mb={MEGABYTES}", f"-max_len={LONGEST}"]
    command = [sys.executable, str(Path(__file__).with_name("fuzz_targets.py")), name, str(corpus), *limits]
    log = keep / name / "log.txt"
    with log.open("wb") as file:
        ended = subprocess.run(
            [*command, f"-artifact_prefix={keep / name}/", "-print_final_stats=1", "-verbosity=1"],
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    text = log.read_text(errors="replace")
    counts = re.findall(r"stat::number_of_executed_units:\s+(\d+)", text) or re.findall(r"^#(\d+)", text, re.MULTILINE)
    executed = int(counts[-1]) if counts else 0
    found = sorted(path.name for path in (keep / name).glob("*-*") if path.is_file())
    errors = re.findall(r"Uncaught Python exception: ===\n(.*)|^==\d+== ERROR: (.*)", text, re.MULTILINE)
    if not found and not ended.returncode:
        return executed, "none"
    return executed, f"{''.join(errors[0])[:160] if errors else f'ended with {ended.returncode}'} ({', '.join(found)})"


def main() -> None:
    """Fuzz the readers and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=600, help="seconds for each reader")
    parser.add_argument("--only", nargs="*", choices=sorted(TARGETS), default=sorted(TARGETS))
    parser.add_argument("--keep", type=Path, default=None, help="folder of corpora, logs and findings")
    options = parser.parse_args()
    keep = options.keep or Path(tempfile.mkdtemp(prefix="fuzz_readers"))
    print(f"corpora, logs and findings: {keep}\n\n| reader | seconds | executions | findings |\n|---|---|---|---|")
    wrong = False
    for name in options.only:
        executed, found = run_target(name, options.seconds, keep)
        print(f"| {name} | {options.seconds} | {executed:,} | {found} |", flush=True)
        wrong |= found != "none"
    sys.exit(wrong)


if __name__ == "__main__":
    main()
