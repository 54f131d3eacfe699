"""Degrees of the mesh that a script gives in code: an ``mpu`` (Megatron's protocol), ``mesh_param``, a DeviceMesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shoal.errors import ConfigError

# By axis, the names of Megatron's parallel_state, of DeepSpeed's grids and of its sequence parallelism; the first that
# there is counts. The ``model_parallel`` ranks of a grid are those of all its pipeline stages.
_MPU_NAMES: Mapping[str, tuple[str, ...]] = {
    "tp": ("slice_parallel", "tensor_model_parallel", "model_parallel"),
    "pp": ("pipeline_model_parallel", "pipe_parallel"),
    "sp": ("sequence_parallel",),
    "cp": ("context_parallel",),
}
# The names of a DeviceMesh's dims, in the order in which they may stand.
_DIM_NAMES: Mapping[str, tuple[str, ...]] = {
    "pp": ("pp",),
    "dp_replicate": ("dp_replicate",),
    "dp_shard": ("dp_shard", "dp", "data_parallel", "fsdp"),
    "cp": ("cp",),
    "sp": ("sp", "sequence_parallel"),
    "tp": ("tp",),
}


TP_SIZES: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # by ``deepspeed.tp_model_init``


def given_degrees(model: nn.Module, mpu: Any, mesh_param: Any, num_ranks: int) -> dict[str, int]:
    """The degree of each axis above 1 that ``initialize`` was given in code. ``mpu`` and ``mesh_param`` go first.

    Args:
        mesh_param: DeepSpeed's (data-parallel ranks, sequence-parallel ranks), or a DeviceMesh.

    Raises: ConfigError: they do not multiply to the number of ranks, or order ranks otherwise than Shoal does.
    """
    tp = TP_SIZES.get(model, 1)
    return {**({"tp": tp} if tp > 1 else {}), **_of_mesh(mpu, mesh_param, num_ranks)}


def _of_mesh(mpu: Any, mesh_param: Any, num_ranks: int) -> dict[str, int]:
    if mpu is not None:
        return _of_mpu(mpu, num_ranks)
    if isinstance(mesh_param, DeviceMesh):
        return _of_device_mesh(mesh_param, num_ranks)
    if mesh_param is None:
        return {}
    data, sequence = (int(degree) for degree in mesh_param)
    if data * sequence != num_ranks:
        raise _misfit(f"mesh_param = {tuple(mesh_param)!r}", data * sequence, num_ranks)
    return {"sp": sequence} if sequence > 1 else {}


def _of_mpu(mpu: Any, num_ranks: int) -> dict[str, int]:
    degrees: dict[str, int] = {}
    for axis, names in _MPU_NAMES.items():
        readers = [getattr(mpu, f"get_{name}_world_size", None) for name in names]
        sizes = [int(read()) for read in readers if read is not None]
        if sizes and sizes[0] > 1:
            degrees[axis] = sizes[0]
    product = 1
    for degree in degrees.values():
        product *= degree
    read_data = getattr(mpu, "get_data_parallel_world_size", None)
    data = num_ranks // product if read_data is None else int(read_data())
    if product * data != num_ranks:
        parts = " x ".join(f"{axis} {degree}" for axis, degree in {**degrees, "data-parallel": data}.items())
        raise _misfit(f"the mpu's {parts}", product * data, num_ranks)
    return degrees


def _of_device_mesh(mesh: DeviceMesh, num_ranks: int) -> dict[str, int]:
    names = mesh.mesh_dim_names or ()
    axes = [next((axis for axis, known in _DIM_NAMES.items() if name in known), name) for name in names]
    order = list(_DIM_NAMES)
    unknown = [axis for axis in axes if axis not in order]
    if unknown or not axes or axes != sorted(axes, key=order.index):
        raise ConfigError(
            f"a DeviceMesh with the dims {names!r}.",
            do=f"name its dims from these, in this order: {', '.join(order)}.",
            code="mesh",
        )
    ranks = mesh.mesh.flatten().tolist()
    if ranks != list(range(num_ranks)):
        raise ConfigError(
            f"a DeviceMesh of {len(ranks)} ranks, {ranks[:8]}{' ...' if len(ranks) > 8 else ''}, in {num_ranks} ranks.",
            do=f"make it with init_device_mesh, over all {num_ranks} ranks in order.",
            code="mesh",
        )
    return {axis: size for axis, size in zip(axes, mesh.mesh.shape, strict=True) if size > 1 or axis == "dp_replicate"}


def _misfit(what: str, product: int, num_ranks: int) -> ConfigError:
    return ConfigError(
        f"{what} = {product} ranks, and there are {num_ranks}.",
        do=f"start {product} ranks, or make the degrees multiply to {num_ranks}.",
        code="mesh",
    )
