"""Counts the machine instructions of the kernel's main loop, for a GPU that need not be there.

    python benchmarks/cost/kernel_code.py [--capability 90]

Compiles `partial_rows` as a launch over a list does, disassembles it with the tools that Triton brings, and prints for
the loop that loads most: instructions an element, bytes of a load, registers a thread, spilled bytes. A memory-bound
kernel must do little for each element: an H200 issues some 30 × 10¹² instructions a second and reads 4.2 × 10¹² bytes.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.append(str(Path(__file__).parents[1]))

from machine import describe_machine

from trainsentry.collectors.torch.rows.kernels import triton_kernels
from trainsentry.collectors.torch.rows.kernels.chunks import LANES, TILE, UNROLL

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
THREADS = 128


def compiled(pointer: str, capability: int) -> bytes:
    """Return the machine code of the kernel over a list of tensors of one dtype."""
    tables = dict.fromkeys(("addresses", "sizes", "places", "slots"), "*i64")
    numbers = {"first": "i32", "size": "i32", "chunk": "i32", "slot": "i32", "eps": "fp32"}
    constants = {"many": True, "split": False, "accumulator": tl.float64, "lanes": LANES, "unroll": UNROLL}
    constants |= {"alignment": 16, "histograms": False}
    signature = {
        "x_pointer": pointer,
        **tables,
        **dict.fromkeys(("partials", "counters", "divisor"), "*fp64"),
        **numbers,
        **dict.fromkeys(constants, "constexpr"),
    }
    source = ASTSource(triton_kernels.partial_rows, signature, constants)
    code: bytes = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]
    return code


def loops_of(assembly: str) -> list[list[str]]:
    """Return the instructions of each loop, from its label to the branch back to it."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    loops = []
    for line in map(str.strip, assembly.splitlines()):
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(instruction[1])
            target = re.search(r"BRA\S*.*?(\.L_x_\d+)", instruction[1])
            if target and target[1] in labels:
                loops.append(instructions[labels[target[1]] :])
    return loops


def describe(pointer: str, capability: int) -> str:
    """Return a line of the table."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled(pointer, capability))
        file.flush()
        assembly = subprocess.run([TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True)
        usage = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    loop = max(loops_of(assembly.stdout), key=len)
    widths = [int(bits) // 8 for line in loop for bits in re.findall(r"(?:LDGSTS|LDG)\S*\.(128|64)", line)]
    registers = re.findall(r"REG:(\d+)", usage.stdout)[0]
    stack = re.findall(r"STACK:(\d+)", usage.stdout)[0]
    each = len(loop) * THREADS / TILE
    return f"| {pointer.strip('*')} | {each:.1f} | {max(widths, default=4)} | {registers} | {stack} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=90)
    options = parser.parse_args()
    print("| dtype | instructions an element | bytes a load | registers | spilled bytes |\n|---|---|---|---|---|")
    for pointer in ("*fp32", "*bf16", "*fp16"):
        print(describe(pointer, options.capability))
    print(f"\nFor compute capability {options.capability}; Triton {triton.__version__}; {describe_machine()}")


if __name__ == "__main__":
    main()
