"""What a rank holds of each parameter of a model: all of it, a shard, or a fragment of a flat tensor."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from trainsentry.collectors.torch import deepspeed_partitions, fsdp1_shards
from trainsentry.collectors.torch.clean_names import CleanNames
from trainsentry.collectors.torch.named import NamedParameter


def parameters_of_chunk(
    chunk: nn.Module, stage: int, names: CleanNames, wrappers: Iterable[Any] = ()
) -> Iterator[NamedParameter]:
    """Yield the parameters of a model chunk by the user's names, each with where its values lie on this rank.

    `wrappers` are DeepSpeed's optimizers, which hold the values.
    """
    partitions: deepspeed_partitions.Held = {}
    for optimizer in wrappers:
        partitions |= deepspeed_partitions.held_by(optimizer, chunk)
    shards = fsdp1_shards.of_model(chunk)
    for raw, parameter in chunk.named_parameters():
        if fsdp1_shards.is_flat(parameter):
            prefix = raw.rpartition(".")[0]
            for inner, fragment in fsdp1_shards.inside(parameter):
                name = names.of(f"{prefix}.{inner}" if prefix else inner)
                yield NamedParameter(name, parameter, _module(name), stage, fragment)
            continue
        name = names.of(raw)
        held = partitions.get(id(parameter))
        if held is not None:
            yield NamedParameter(name, held[0], _module(name), stage, held[1], parameter)
        else:
            yield NamedParameter(name, parameter, _module(name), stage, shards.get(id(parameter)))


def _module(name: str) -> str:
    return name.rpartition(".")[0]
