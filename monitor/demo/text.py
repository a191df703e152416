"""Real English text that every Python carries: the language reference behind `help()`."""

from pydoc_data import topics

import torch
from torch import Tensor


def language_reference() -> Tensor:
    """Return the topics of Python's language reference as one uint8 tensor of bytes (about 460 kB)."""
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


class Batches:
    """Random windows of the text: inputs and the bytes that follow, both of shape (batch, length)."""

    def __init__(self, batch: int, length: int, seed: int) -> None:
        self.data = language_reference()
        self.batch = batch
        self.length = length
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Return the next batch."""
        last = len(self.data) - self.length - 1
        starts = torch.randint(0, last, (self.batch,), generator=self._generator)
        rows = torch.stack([self.data[s : s + self.length + 1] for s in starts.tolist()]).long()
        return rows[:, :-1], rows[:, 1:]
