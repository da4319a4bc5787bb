"""The section `parallel` of the configuration: how one instance is spread over processes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from isthmus_core.config_section import Section

Device = Annotated[str, Field(pattern=r"^(cpu|cuda:\d+)$")]


class ParallelConfig(Section):
    """One instance over pipeline_parallel_size x tensor_parallel_size processes of one host, a device each."""

    tensor_parallel_size: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="ranks that share every layer of a pipeline stage; attention data parallelism is part of it",
    )
    pipeline_parallel_size: int = Field(default=1, ge=1, le=1024, description="stages, each with some of the layers")
    data_parallel_size: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="groups inside tensor_parallel_size that have requests and a cache of their own; attention is "
        "split over tensor_parallel_size / data_parallel_size ranks, everything else over all",
    )
    layer_split: list[Annotated[int, Field(ge=1)]] | None = Field(
        default=None, description="layers of each stage, for example [5, 3]; default: even, the first stages one more"
    )
    backend: Literal["auto", "gloo", "nccl"] = Field(
        default="auto",
        description="of torch.distributed; auto: nccl when every rank has a CUDA device of its own, else gloo",
    )
    devices: list[Device] | None = Field(
        default=None,
        description="device of each rank, for example [cuda:0, cuda:0]; default: rank r has cuda:r, or the CPU",
    )
    step_timeout_s: float = Field(
        default=300.0,
        gt=0,
        le=86_400,
        description="a rank that keeps the others waiting this long in a step takes the instance down",
    )

    @property
    def world_size(self) -> int:
        """Processes of the instance."""
        return self.pipeline_parallel_size * self.tensor_parallel_size

    @model_validator(mode="after")
    def _possible(self) -> ParallelConfig:
        tp, pp, dp = self.tensor_parallel_size, self.pipeline_parallel_size, self.data_parallel_size
        if tp % dp:
            raise ValueError(
                f"data_parallel_size = {dp} does not divide tensor_parallel_size = {tp}: its groups are part of it, "
                f"write tensor_parallel_size: {dp * -(-tp // dp)} or another data_parallel_size"
            )
        if self.layer_split is not None and len(self.layer_split) != pp:
            raise ValueError(
                f"layer_split = {self.layer_split} names {len(self.layer_split)} stages: write one number for each of "
                f"the {pp} of pipeline_parallel_size"
            )
        if self.devices is not None and len(self.devices) != self.world_size:
            raise ValueError(
                f"devices = {self.devices} names {len(self.devices)} devices: write one for each of the "
                f"{self.world_size} ranks"
            )
        return self
