"""Checks that ranks on two hosts are compared, that the incident names the faulty one, and that all stop together.

    sudo python benchmarks/limits/two_hosts.py [--strategy ddp|fsdp2]

Makes two hosts on this machine, each with its own network and name (Linux namespaces; needs root, `ip` and `unshare`),
joined by a virtual cable. Four ranks train over gloo, two on each host; a bit of the last rank's weight flips at step
40, and an incident stops the run: a replica (ddp) differs from the others, a shard (fsdp2) from its previous value plus
its update. Prints each rank's output and the incident.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from machine import describe_machine

HOSTS = {"hosta": "10.77.0.1", "hostb": "10.77.0.2"}
WORLD, PER_HOST, FAULT_STEP = 4, 2, 40


def sh(command: str) -> None:
    """Run a shell command that must succeed."""
    subprocess.run(command, shell=True, check=True)


def make_hosts() -> None:
    """Make two network namespaces and a virtual cable between them."""
    remove_hosts()
    for host in HOSTS:
        sh(f"ip netns add {host}")
    sh("ip link add cablea netns hosta type veth peer name cableb netns hostb")
    for (host, address), cable in zip(HOSTS.items(), ("cablea", "cableb"), strict=True):
        for line in (f"addr add {address}/24 dev {cable}", f"link set {cable} up", "link set lo up"):
            sh(f"ip -n {host} {line}")


def remove_hosts() -> None:
    """Remove the namespaces if they exist."""
    for host in HOSTS:
        subprocess.run(f"ip netns del {host}", shell=True, check=False, stderr=subprocess.DEVNULL)


def start(host: str, cable: str, rank: int, strategy: str, out: Path) -> "subprocess.Popen[str]":
    """Start a rank on a host."""
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % PER_HOST),
        "WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": HOSTS["hosta"],
        "MASTER_PORT": "29577",
        "GLOO_SOCKET_IFNAME": cable,
        "TP_SOCKET_IFNAME": cable,
        "OMP_NUM_THREADS": "1",
        "TRAINSENTRY_REPORT": "0",
    }
    inside = f"hostname {host}; exec {sys.executable} {__file__} --rank --strategy {strategy} --out {out}"
    command = ["ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", inside]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def train(strategy: str, out: Path) -> None:
    """Train on this rank."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    import trainsentry

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    model: nn.Module = nn.Sequential(*layers, nn.Linear(64, 8))
    if strategy == "fsdp2":
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=_mesh())
        fully_shard(model, mesh=_mesh())
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parts = ("parameters",) if strategy == "ddp" else ("parameters", "updates")
    collect = {part: {"every": 1} for part in parts}
    config = {"output_dir": str(out), "on_incident": {"stop": True, "dump": False}, "collect": collect}
    generator = torch.Generator().manual_seed(rank)
    monitor = trainsentry.TrainMonitor(config).watch(model, optimizer)
    try:
        for step in range(400):
            if step == FAULT_STEP and rank == WORLD - 1:
                weight = dict(model.named_parameters())["3.weight" if strategy == "fsdp2" else "module.3.weight"]
                with torch.no_grad():
                    local = getattr(weight, "_local_tensor", weight)
                    local.detach().view(-1).view(torch.int32)[7] ^= 1 << 14
            x = torch.randn(32, 64, generator=generator)
            loss = (model(x) - x[:, :8].sin()).square().mean()
            loss.backward()
            monitor.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
        print(f"rank {rank} on {os.uname().nodename}: trained to the end")
    except trainsentry.TrainingStopped as stopped:
        print(f"rank {rank} on {os.uname().nodename}: stopped at step {stopped.step}: {stopped}")
    monitor.close()
    dist.destroy_process_group()


def _mesh() -> object:
    import torch

    return torch.distributed.device_mesh.init_device_mesh("cpu", (WORLD,))


def main() -> None:
    """Make the hosts, train, and print the outcome."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="ddp", choices=["ddp", "fsdp2"])
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        train(options.strategy, options.out)
        return
    print(describe_machine(), flush=True)
    make_hosts()
    try:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder)
            cables = ["cablea", "cablea", "cableb", "cableb"]
            hosts = ["hosta", "hosta", "hostb", "hostb"]
            ranks = [start(hosts[r], cables[r], r, options.strategy, out) for r in range(WORLD)]
            for process in ranks:
                print(process.communicate(timeout=300)[0].strip())
            folders = {path.parent.name: len(list(path.parent.iterdir())) for path in out.rglob("*.csv")}
            print("files: " + ", ".join(f"{name} {count}" for name, count in sorted(folders.items())))
            incidents = out / "incidents.jsonl"
            for line in incidents.read_text().splitlines() if incidents.is_file() else ["no incident"]:
                said = json.loads(line) if line.startswith("{") else {"summary": line}
                print(said["summary"])
    finally:
        remove_hosts()


if __name__ == "__main__":
    main()
