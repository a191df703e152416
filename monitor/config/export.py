"""The configuration of what records go to."""

from typing import Annotated, Literal

from pydantic import Field

from trainsentry.monitor.config.blocks import Block, optional


class Csv(Block):
    """CSV tables.

    `finished_blocks` says what becomes of a block when the next one begins: it stays CSV, or is turned into CSV under
    zstd or into Parquet (zstd), by a process that nobody waits for.
    """

    steps_per_file: Annotated[int, Field(ge=1)] = 1000
    finished_blocks: Literal["csv", "zstd", "parquet"] = "csv"


class TensorBoard(Block):
    """Curves and pages, live.

    Of every quantity there are numbers over all layers and a picture of layers over steps, renewed every `renew_every`
    steps, in a long run less often. The statistics of single series whose names match `raw` are written too, unless
    that makes more than `max_raw_tags` (-1: any number).
    """

    raw: list[str] = ["*"]
    max_raw_tags: Annotated[int, Field(ge=-1)] = 5000
    renew_every: Annotated[int, Field(ge=1)] = 100


class Prometheus(Block):
    """Metrics: an endpoint of the node (the first rank there that has the port serves all), or a textfile."""

    port: Annotated[int, Field(ge=1, le=65535)] | None = 9464
    address: str = "127.0.0.1"
    textfile: str | None = None


class Wandb(Block):
    """Numbers over all layers, logged scalars and incidents to Weights & Biases, from rank 0."""

    project: Annotated[str, Field(min_length=1)] = "trainsentry"
    entity: str | None = None
    name: str | None = None
    mode: Literal["online", "offline"] = "online"


class Mlflow(Block):
    """The same to MLflow."""

    experiment: Annotated[str, Field(min_length=1)] = "trainsentry"
    tracking_uri: str | None = None
    name: str | None = None


class Webhook(Block):
    """Each incident is posted once to the address in the environment variable `url_env`.

    `style`: `json` sends the incident's line, `text` its sentence as chats take it. `token_env` names the variable that
    holds a bearer token. `timeout` in seconds, `retries` after the first try.
    """

    url_env: Annotated[str, Field(pattern=r"^[A-Z_][A-Z0-9_]*$")] = "TRAINSENTRY_WEBHOOK_URL"
    token_env: Annotated[str, Field(pattern=r"^[A-Z_][A-Z0-9_]*$")] | None = None
    style: Literal["json", "text"] = "json"
    timeout: Annotated[float, Field(gt=0, le=120)] = 10.0
    retries: Annotated[int, Field(ge=0, le=20)] = 5


class Export(Block):
    """Where records go. `max_wait`: seconds that a writer or a full ring is waited for, in total per trouble.

    `report` has report.html written when a run ends that had an incident, by a process that nobody waits for.
    """

    csv: Annotated[Csv | None, optional(Csv)] = Csv()
    tensorboard: Annotated[TensorBoard | None, optional(TensorBoard)] = None
    report: bool = True
    prometheus: Annotated[Prometheus | None, optional(Prometheus)] = None
    webhook: Annotated[Webhook | None, optional(Webhook)] = None
    wandb: Annotated[Wandb | None, optional(Wandb)] = None
    mlflow: Annotated[Mlflow | None, optional(Mlflow)] = None
    max_wait: Annotated[float, Field(gt=0, le=600)] = 5.0
