"""The configuration of the exporters."""

from typing import Annotated, Literal

from pydantic import Field

from trainsentry.monitor.config.blocks import Block, Unit, optional


class Csv(Block):
    """CSV tables, one for each quantity and block of steps."""

    steps_per_file: Annotated[int, Field(ge=1, description="Steps in one table."), Unit("steps")] = 1000
    finished_blocks: Literal["csv", "zstd", "parquet"] = Field(
        default="csv",
        description="Format of a table once the next one begins. A process of its own converts it; nothing waits.",
    )


class TensorBoard(Block):
    """Curves and pages in TensorBoard while the run goes on: numbers over all layers, heatmaps, single series."""

    raw: list[str] = Field(default=["*"], description="Shell-style patterns over the names of single series to write.")
    max_raw_tags: Annotated[
        int,
        Field(ge=-1, description="Single series are written while they are at most this many. -1: any number."),
        Unit("series"),
    ] = 5000
    renew_every: Annotated[
        int,
        Field(ge=1, description="Distance between heatmaps of a quantity; it grows in a long run."),
        Unit("steps"),
    ] = 100


class Prometheus(Block):
    """Metrics for Prometheus: an endpoint of the host, or a text file."""

    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        default=9464, description="Port of the endpoint. The first rank of a host that gets it serves all ranks."
    )
    address: str = Field(default="127.0.0.1", description="Address of the endpoint.")
    textfile: str | None = Field(default=None, description="File for the node exporter, also without a port.")


class Wandb(Block):
    """Numbers over all layers, logged scalars and incidents to Weights & Biases, from rank 0."""

    project: Annotated[str, Field(min_length=1, description="Name of the project.")] = "trainsentry"
    entity: str | None = Field(default=None, description="User or team. `null`: the default of your account.")
    name: str | None = Field(default=None, description="Name of the run. `null`: one that Weights & Biases makes up.")
    mode: Literal["online", "offline"] = Field(default="online", description="`offline` writes to disk only.")


class Mlflow(Block):
    """Numbers over all layers, logged scalars and incidents to MLflow, from rank 0."""

    experiment: Annotated[str, Field(min_length=1, description="Name of the experiment.")] = "trainsentry"
    tracking_uri: str | None = Field(default=None, description="Tracking server. `null`: MLflow's own default.")
    name: str | None = Field(default=None, description="Name of the run. `null`: one that MLflow makes up.")


class Webhook(Block):
    """Each incident is posted once, when its ranking has settled. Address and token come from the environment."""

    url_env: Annotated[
        str, Field(pattern=r"^[A-Z_][A-Z0-9_]*$", description="Environment variable that holds the address.")
    ] = "TRAINSENTRY_WEBHOOK_URL"
    token_env: Annotated[str, Field(pattern=r"^[A-Z_][A-Z0-9_]*$")] | None = Field(
        default=None, description="Environment variable that holds a bearer token."
    )
    style: Literal["json", "text"] = Field(
        default="json", description="`json` posts the incident's line, `text` its sentence, as chats take it."
    )
    timeout: Annotated[float, Field(gt=0, le=120, description="Longest time of one try."), Unit("seconds")] = 10.0
    retries: Annotated[int, Field(ge=0, le=20, description="Tries after the first one."), Unit("tries")] = 5


class Export(Block):
    """The places that records are written to."""

    csv: Annotated[Csv | None, optional(Csv)] = Csv()
    tensorboard: Annotated[TensorBoard | None, optional(TensorBoard)] = None
    report: bool = Field(default=True, description="Write `report.html` when a run ends that had an incident.")
    prometheus: Annotated[Prometheus | None, optional(Prometheus)] = None
    webhook: Annotated[Webhook | None, optional(Webhook)] = None
    wandb: Annotated[Wandb | None, optional(Wandb)] = None
    mlflow: Annotated[Mlflow | None, optional(Mlflow)] = None
    max_wait: Annotated[
        float,
        Field(gt=0, le=600, description="Longest wait for a late writer or a full ring, in total per trouble."),
        Unit("seconds"),
    ] = 5.0
