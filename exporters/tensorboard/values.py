"""Makes TensorBoard values other than numbers, without TensorFlow."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.custom_scalar import layout_pb2, metadata
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.util import tensor_util

from trainsentry.collectors.series import writable


def image(tag: str, png: bytes, width: int, height: int) -> Summary.Value:
    """Return a picture."""
    return Summary.Value(tag=writable(tag), image=Summary.Image(encoded_image_string=png, width=width, height=height))


def histogram(tag: str, values: npt.NDArray[np.float64]) -> Summary.Value:
    """Return a histogram of values."""
    return histogram_pb(writable(tag), values, buckets=40).value[0]


def text(tag: str, markdown: str) -> Summary.Value:
    """Return a text in Markdown."""
    return text_pb(tag, writable(markdown)).value[0]


def hparams(values: Mapping[str, "bool | float | str"]) -> list[Summary.Value]:
    """Return the settings of a run."""
    plain = {writable(name): writable(value) if isinstance(value, str) else value for name, value in values.items()}
    return list(hparams_pb(plain).value)


def layout(categories: Mapping[str, Mapping[str, Sequence[str]]]) -> Summary.Value:
    """Return the layout of the custom scalars page: category → chart → patterns of tags (regular expressions)."""
    made = layout_pb2.Layout(
        category=[
            layout_pb2.Category(
                title=category,
                chart=[
                    layout_pb2.Chart(
                        title=writable(title),
                        multiline=layout_pb2.MultilineChartContent(tag=[writable(tag) for tag in tags]),
                    )
                    for title, tags in charts.items()
                ],
            )
            for category, charts in categories.items()
        ]
    )
    tensor: Any = tensor_util.make_tensor_proto(made.SerializeToString())
    return Summary.Value(tag=metadata.CONFIG_SUMMARY_TAG, tensor=tensor, metadata=metadata.create_summary_metadata())
