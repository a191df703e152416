"""One rank's matmuls are slightly wrong now and then."""

import torch
from case import Case, Expect


def _build(run):
    chance = torch.Generator().manual_seed(run.seed)

    def hook(module, args, output):
        wrong = run.harmed and run.rank == 1 and float(torch.rand(1, generator=chance)) < 0.05
        if wrong:
            output = output.clone()
            output.view(-1)[11] += 1e-2 * float(output.detach().abs().max())
        return output

    for module in run.plain.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(hook)


CASE = Case(
    "F13",
    "sticky wrong matmuls on one rank",
    Expect(("activation_output",), ("spike", "replica_mismatch"), rank=1),
    ranks=2,
    build=_build,
)
