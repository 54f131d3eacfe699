"""DeepSpeed's ``runtime.data_pipeline``: analyses by the ranks of a job, and random-LTD of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from shoal.comm.world import current_world
from shoal.data.analysis import DataAnalyzer as Analyzer
from shoal.engine.parts.random_ltd import RandomLayerTokenDrop
from shoal.errors import UsageError
from shoal.mesh import Mesh


class DataAnalyzer(Analyzer):
    """``shoal.data.analysis.DataAnalyzer`` whose workers wait for each other as ranks of ``torch.distributed``."""

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """Both phases. Communicates: two barriers of all ranks.

        Raises: UsageError: ``comm_group`` has not all ranks.
        """
        world = current_world()
        if comm_group is not None and comm_group.size() != world.size:
            what = f"comm_group has {comm_group.size()} of {world.size} ranks."
            raise UsageError(what, do="leave it out, and analyse by all ranks.", code="analysis")
        self._barrier = partial(world.communicator("dp", Mesh.of(world.size)).barrier, label="analysis")
        super().run_map_reduce()


class DistributedDataAnalyzer(DataAnalyzer):
    """The same with one worker for each rank of ``comm_group``, or as ``num_workers`` and ``worker_id`` say.

    Args:
        device: not used: values are merged from files.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        num_threads: int = 1,
        worker_id: int = 0,
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Any] = (),
        metric_types: Sequence[str] = (),
        save_path: Any = "./",
        collate_fn: Any = None,
        device: Any = "cuda",
        comm_group: Any = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        if comm_group is not None:
            num_workers, worker_id = comm_group.size(), comm_group.rank()
        self._group = comm_group
        super().__init__(
            dataset,
            num_workers,
            worker_id,
            num_threads,
            batch_size=batch_size,
            metric_names=metric_names,
            metric_functions=metric_functions,
            metric_types=metric_types,
            save_path=save_path,
            collate_fn=collate_fn,
            sample_indices=sample_indices,
        )

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """Both phases. Communicates: two barriers of all ranks."""
        super().run_map_reduce(self._group if comm_group is None else comm_group)


def convert_to_random_ltd(model: Any, convert_type: type) -> Any:
    """The engine itself: the config has its layers run on random tokens already.

    Raises: UsageError: the config has no random-LTD, or its layers are of another class.
    """
    dropping = model.part(RandomLayerTokenDrop)
    section = "data_efficiency.data_routing.random_ltd"
    if dropping is None:
        what, do = "it is off in the config.", "set enabled to true."
        raise UsageError(f"convert_to_random_ltd: {what}", where=section, do=do, code="random-ltd-layer")
    modules = dict(model.module.named_modules())
    if wrong := [name for name in dropping.layers if not isinstance(modules[name], convert_type)]:
        raise UsageError(
            f"convert_to_random_ltd: layer {wrong[0]} is a {type(modules[wrong[0]]).__name__}, and no"
            f" {convert_type.__name__}.",
            where=f"{section}.random_ltd_layer_id",
            do="list numbers of the model's blocks, counted from 0.",
            code="random-ltd-layer",
        )
    return model


def save_without_random_ltd(model: Any) -> dict[str, Any]:
    """The module's state dict. Its names are those of the model without random-LTD."""
    state: dict[str, Any] = getattr(model, "module", model).state_dict()
    return state


def remove_random_ltd_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict that DeepSpeed's random-LTD has saved, with the names of the model without it."""
    return {name.replace(".random_ltd_layer", ""): value for name, value in state_dict.items()}
