"""A training loop with gradient accumulation and a learning-rate schedule, watched by trainsentry.

    python examples/own_loop.py

Writes to monitor_output/. Look at it with `trainsentry diagnose monitor_output` or, after
`trainsentry csv2tb monitor_output`, with TensorBoard.
"""

import torch
from torch import nn

import trainsentry


def main() -> None:
    """Train a small classifier on two interleaved spirals."""
    torch.manual_seed(0)
    angle = torch.rand(4096) * 12
    label = torch.randint(0, 2, (4096,))
    radius = angle / 12 + 0.03 * torch.randn(4096)
    turn = angle + torch.pi * label
    points = torch.stack([radius * turn.cos(), radius * turn.sin()], dim=1)

    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
    with trainsentry.TrainMonitor().watch(model, optimizer) as monitor:
        monitor.on_incident(lambda incident: print(incident.summary))
        for step in range(300):
            optimizer.zero_grad()
            for rows in torch.randint(0, 4096, (2, 256)):
                loss = nn.functional.cross_entropy(model(points[rows]), label[rows]) / 2
                loss.backward()
                monitor.log(loss=loss)
            monitor.log(learning_rate=schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
            if step % 50 == 0:
                norm = monitor.metrics("gradient")["0.weight"]["norm"]
                print(f"step {step}: loss {2 * loss.item():.3f}, gradient norm of the first layer {norm:.3g}")


if __name__ == "__main__":
    main()
