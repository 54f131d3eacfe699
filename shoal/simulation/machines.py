"""What GPUs, their nodes and networks reach: the figures of ``machines.yaml``, or of a file of the same form.

"h100"                 as in the file
"a100-80g@25gbe"       with another network: 25 Gb/s Ethernet for a node
"h100@8x200g"          eight ports of 200 Gb/s for a node
"figures.yaml"         one machine, as a file
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shoal.errors import UsageError
from shoal.simulation.collective_times import Links

_FILE = Path(__file__).with_name("machines.yaml")
_NETWORK = re.compile(r"(?:(\d+)x)?(\d+)g(?:b|be)?", re.IGNORECASE)
_COMPILED_LAUNCH = 10e-6
_PORT_REACHED = 0.9  # of a port that the network of a name says


@dataclass(frozen=True)
class GpuNode:
    """A node with GPUs. Rates are what is reached, per second and per GPU; bytes in one direction.

    Attributes: ``multiprocessors``, ``tile_prologue``, ``attention_forward``, ``attention_backward``: see ``kernels``.
    ``overlap``: how many times as long a kernel takes while a collective runs. ``context_nbytes``: of the CUDA context.
    ``workspace_nbytes``: that PyTorch allocates for cuBLAS on each stream with products.
    ``host_bandwidth``: of all host memory of the node. ``launch_seconds``: that the host needs to queue one kernel,
    copy or collective. ``kernel_seconds``: that the shortest kernel takes; ``kernel_latency``: that each takes in
    addition to its bytes or products. ``operator_bandwidths``: by name, of operators slower than memory, and of
    ``strided``: those that read tensors with gaps.
    """

    name: str
    matrix_flops: Mapping[torch.dtype, float]
    memory_bandwidth: float
    gpu_nbytes: int | None  # of memory that tensors may have; None: no limit
    multiprocessors: int
    tile_prologue: float
    attention_forward: float  # of what plain matrix products reach
    attention_backward: float
    overlap: float
    context_nbytes: int
    workspace_nbytes: int
    links: Links
    bus_bandwidth: float
    pageable_bandwidth: float
    host_bandwidth: float
    disk_bandwidth: float
    host_nbytes: int
    gpus_per_node: int
    launch_seconds: float = _COMPILED_LAUNCH
    kernel_seconds: float = 2e-6
    kernel_latency: float = 1.5e-6
    peak_flops: float = 0.0  # that the manufacturer gives for bf16, else fp16; MFU is the part of it that is reached
    operator_bandwidths: Mapping[str, float] = field(default_factory=dict)
    scaled_blocks: tuple[int, ...] = ()  # of a row of 8 bits, that have a scale in one product
    multiplies_groups: bool = False  # torch.nn.functional.grouped_mm is one kernel
    is_cpu: bool = False  # a rank is a process that computes on the CPU: it waits for each operation

    def compiled(self) -> GpuNode:
        """With a host that queues what torch.compile made: its wrappers run hardly any Python."""
        return replace(self, launch_seconds=min(self.launch_seconds, _COMPILED_LAUNCH))

    def flops(self, dtype: torch.dtype) -> float:
        """Floating-point operations of matrix products per second; of a dtype without a figure those of fp32."""
        return self.matrix_flops.get(dtype, self.matrix_flops[torch.float32])


class _Figures(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _RateFigures(_Figures):
    peak: float = Field(gt=0, allow_inf_nan=False)
    reached: float = Field(gt=0, le=1)

    @property
    def rate(self) -> float:
        return self.peak * self.reached


class _LinkFigures(_RateFigures):
    kind: Literal["nvlink", "pcie"]
    latency_factor: float = Field(ge=0)
    channels: int = Field(gt=0)


class _NetworkFigures(_RateFigures):
    latency: float = Field(ge=0)


class _BusFigures(_RateFigures):
    pageable: float = Field(gt=0)


class _HostFigures(_RateFigures):
    memory: float = Field(gt=0)


class _FlopsFigures(_Figures):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, _RateFigures]
    float32: _RateFigures  # which dtypes without a figure have, too

    @model_validator(mode="after")
    def _check_dtypes(self) -> _FlopsFigures:
        wrong = [name for name in self.__pydantic_extra__ if not isinstance(getattr(torch, name, None), torch.dtype)]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is no dtype of torch")
        return self

    @property
    def peak(self) -> float:
        """Of bf16, else fp16, else fp32."""
        given = self.__pydantic_extra__
        return (given.get("bfloat16") or given.get("float16") or self.float32).peak

    @property
    def by_dtype(self) -> dict[torch.dtype, float]:
        rates = {"float32": self.float32, **self.__pydantic_extra__}
        return {getattr(torch, name): figures.rate for name, figures in rates.items()}


class _TileFigures(_Figures):
    multiprocessors: int = Field(gt=0)
    prologue: float = Field(ge=0)


class _AttentionFigures(_Figures):
    forward: float = Field(gt=0, le=1)
    backward: float = Field(gt=0, le=1)


class _GpuFigures(_Figures):
    generation: Literal["volta", "ampere", "hopper", "cpu"]
    memory: int = Field(gt=0)
    memory_bandwidth: _RateFigures
    flops: _FlopsFigures
    tiles: _TileFigures
    attention: _AttentionFigures
    overlap: float = Field(ge=1)
    context: float = Field(ge=0)
    workspace: int = Field(ge=0)
    kernel: float = Field(2e-6, ge=0)
    latency: float = Field(1.5e-6, ge=0)
    operators: dict[str, Annotated[float, Field(gt=0)]] = {}
    scaled_blocks: tuple[int, ...] = ()
    grouped: bool = False


class _NodeFigures(_Figures):
    gpus: int = Field(gt=0)
    link: _LinkFigures
    network: _NetworkFigures
    bus: _BusFigures
    host: _HostFigures
    disk: float = Field(gt=0)
    launch: float = Field(_COMPILED_LAUNCH, ge=0)


class _MachineFigures(_Figures):
    source: str
    gpu: _GpuFigures
    node: _NodeFigures


@cache
def _all() -> dict[str, Any]:
    return dict(yaml.safe_load(_FILE.read_text()))


def figures_of(name: str) -> dict[str, Any]:
    """The figures of a machine of ``machines.yaml``, as in the file."""
    return dict(_all()[name])


def machine_names() -> list[str]:
    """The machines of ``machines.yaml``."""
    return list(_all())


def nearest_machine(device: str, nbytes: int) -> str | None:
    """The machine with such a GPU, by what its driver calls it and by its memory; None: there is none."""
    spelled = device.lower().replace(" ", "")
    known = [each for each in machine_names() if each.split("-")[0] in spelled]
    return min(known, key=lambda each: abs((machine_of(each).gpu_nbytes or 0) - nbytes), default=None)


def machine_of(name: str | Path | GpuNode) -> GpuNode:
    """A machine by its name or file, or itself.

    Raises: UsageError: an unknown name or network; a file with a figure that is missing, unknown or wrong.
    """
    if isinstance(name, GpuNode):
        return name
    text = str(name)
    if text.endswith((".yaml", ".yml", ".json")):
        return _of_file(Path(text))
    kind, _, network = text.partition("@")
    if kind not in _all():
        raise UsageError(
            f"there are no figures of a machine {text!r}.",
            do=f"use one of {', '.join(map(repr, machine_names()))}, with another network as 'h100@100gbe', or give a"
            " YAML file with figures (see shoal/simulation/machines.yaml).",
            code="dry-run-machine",
        )
    made = _node_of(text, _all()[kind], where=str(_FILE))
    if not network:
        return made
    match = _NETWORK.fullmatch(network)
    if match is None:
        raise UsageError(
            f"{network!r} in {text!r} names no network.",
            do="write the rate of a node's port in Gb/s, such as 25gbe, or the number of ports too, such as 8x400g.",
            code="dry-run-machine",
        )
    per_node = int(match[1] or 1) * int(match[2]) * 1e9 / 8
    return replace(made, links=replace(made.links, network=_PORT_REACHED * per_node / made.gpus_per_node))


def _of_file(path: Path) -> GpuNode:
    try:
        figures = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(
            f"the figures of a machine cannot be read: {error}", where=str(path), code="dry-run-machine"
        ) from error
    return _node_of(path.stem, figures, where=str(path))


def _node_of(name: str, figures: Any, *, where: str) -> GpuNode:
    try:
        machine = _MachineFigures.model_validate(figures)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc'])) or 'the file'}: {each['msg']}" for each in error.errors()]
        raise UsageError(
            f"figures of machine {name!r} are missing or wrong: {'; '.join(problems)}.",
            where=where,
            do="write every figure that the machines of shoal/simulation/machines.yaml have.",
            code="dry-run-machine",
        ) from error
    gpu, node = machine.gpu, machine.node
    return GpuNode(
        name=name,
        matrix_flops=gpu.flops.by_dtype,
        memory_bandwidth=gpu.memory_bandwidth.rate,
        gpu_nbytes=gpu.memory,
        multiprocessors=gpu.tiles.multiprocessors,
        tile_prologue=gpu.tiles.prologue,
        attention_forward=gpu.attention.forward,
        attention_backward=gpu.attention.backward,
        overlap=gpu.overlap,
        context_nbytes=int(gpu.context),
        workspace_nbytes=gpu.workspace,
        links=Links(
            node.link.rate,
            node.network.rate,
            node.link.kind,
            node.network.latency,
            node.link.latency_factor,
            "hopper" if gpu.generation == "cpu" else gpu.generation,
            node.link.channels,
        ),
        bus_bandwidth=node.bus.rate,
        pageable_bandwidth=node.bus.pageable,
        host_bandwidth=node.host.rate,
        disk_bandwidth=node.disk,
        host_nbytes=int(node.host.memory),
        gpus_per_node=node.gpus,
        launch_seconds=node.launch,
        kernel_seconds=gpu.kernel,
        kernel_latency=gpu.latency,
        peak_flops=gpu.flops.peak,
        operator_bandwidths=gpu.operators,
        scaled_blocks=gpu.scaled_blocks,
        multiplies_groups=gpu.grouped,
        is_cpu=gpu.generation == "cpu",
    )
