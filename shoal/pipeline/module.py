"""A model as a list of layers, of which each rank keeps those of its pipeline stages: DeepSpeed's PipelineModule."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from shoal.comm.world import current_world
from shoal.errors import UsageError
from shoal.mesh import Mesh
from shoal.parallel.recompute import checkpoint
from shoal.pipeline.costs import stage_bounds
from shoal.pipeline.layers import LayerOutline, LayerSpec, TiedLayerSpec, build, outline
from shoal.pipeline.schedule import stages_to_ranks
from shoal.pipeline.stage import StageModule
from shoal.pipeline.topology import PipeDataParallelTopology, PipelineParallelGrid, ProcessTopology
from shoal.sharding.storage import is_placeholder


@dataclass(frozen=True)
class _StageLayer:
    """One that this rank runs. Modules are found by name, because they may be replaced (tensor parallelism)."""

    index: int
    module: str | None
    function: Callable[..., Any] | None  # of the module, if there is one, and its input; None: the module


class PipelineModule(StageModule):
    """A model that applies ``layers`` one after another, cut into pipeline stages of consecutive layers.

    This rank keeps the layers of its stages. Layer ``i`` has the name ``"i"``, the layers of a key of TiedLayerSpec
    ``tied_modules.KEY``. Every number of stages starts with the same values: a LayerSpec is built on every rank, in
    order, and dropped where it is not needed, so the ranks' random states agree; with ``seed_layers`` only this rank's
    are built.

    Args:
        layers: modules, LayerSpecs, TiedLayerSpecs, or functions of one argument; or an ``nn.Sequential``. A tuple that
            one layer returns is the one argument of the next.
        num_stages: ranks along the pipeline; None: as in ``topology``. Without both, this rank keeps all layers until
            ``initialize`` cuts the model as the config says: ``pipeline.stages``, ``virtual_stages``, ``partition``.
        topology: a ProcessTopology whose order of ranks is the mesh's: pipe, data, sequence, model.
        loss_fn: called with the output and the labels; None: the last layer returns the loss.
        seed_layers: seed before layer ``i`` is built, with ``base_seed + i``, and before each run of it, with
            ``base_seed * (n + 1) + i`` in the ``n``-th micro-batch from 1; so dropout does not depend on the number of
            stages.
        seed_fn: what seeds; None: Python's, NumPy's and torch's generators.
        partition_method: what the largest stage has least of. ``parameters`` (those that require a gradient),
            ``uniform`` (layers), ``type:REGEX`` (layers whose class matches, without regard to case), ``memory``,
            ``time``, or the cost of each layer.
        activation_checkpoint_interval: run this many layers of a stage at a time under ``activation_checkpoint_func``;
            0: none. Only runs in which a layer has parameters, or of classes named in ``checkpointable_layers``.
        dynamic_shape: what a stage returns may have other shapes though the micro-batch has the same.
        virtual_stages: pipeline stages on each rank.
        stage_to_rank: which rank has which stage: ``loop`` (stage s on rank s mod num_stages), ``v`` (every second
            round goes back), or the rank of each stage.
        sample: inputs of the first layer for one micro-batch, which ``memory`` and ``time`` measure layers with.
        pipeline_rank: which rank's layers to keep; None: this rank's.

    Raises: UsageError: fewer layers than stages, a partition method that is not known, ranks that do not divide.
    Communicates: with ``time``: rank 0's split to all ranks.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str | Sequence[float] = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        *,
        virtual_stages: int = 1,
        stage_to_rank: Literal["loop", "v"] | Sequence[int] = "loop",
        sample: Any = None,
        pipeline_rank: int | None = None,
    ) -> None:
        super().__init__()
        is_whole = num_stages is None and topology is None
        topology = _topology(1 if is_whole else num_stages, topology, pipeline_rank)
        num_ranks = max(topology.get_dim("pipe"), 1)
        ranks = stages_to_ranks(stage_to_rank, num_ranks, 1 if is_whole else virtual_stages)
        self.loss_fn, self.is_dynamic = loss_fn, dynamic_shape
        self.reads_between = "nothing"
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn or set_random_seed, base_seed
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = checkpointable_layers
        self._method, self._sample = "uniform" if is_whole else partition_method, sample
        given = list(layers)
        _check_layers(given)
        outlines = outline(given)
        self._assign(topology, ranks, pipeline_rank, given, outlines)
        seed = (lambda index: self.seed_fn(self.base_seed + index)) if seed_layers else None
        for index, module in build(given, outlines, self._indices(), seed):
            self._keep(index, given[index], outlines[index], module)
        self._method, self._sample = partition_method, sample if is_whole else None
        self._whole = (given, outlines) if is_whole else None

    @property
    def is_whole(self) -> bool:
        """True if this rank has all layers, until ``keep_stages``."""
        return self._whole is not None

    def keep_stages(
        self, topology: ProcessTopology, ranks: Sequence[int], partition_method: str = "best", rank: int | None = None
    ) -> None:
        """Cut a module that was made without ``num_stages`` and ``topology``; parameters stay the same objects.

        Args:
            ranks: of each pipeline stage, along the pipeline.
            partition_method: ``best``: the constructor's.
            rank: along the pipeline; None: this one.
        """
        assert self._whole is not None, "the layers of other ranks are gone"
        given, outlines = self._whole
        modules = {layer.index: self._module(layer) for layer in self._layers[0]}
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        for index, module in modules.items():
            if module is not None:  # whose parameters may have been replaced (tensor parallelism)
                its_names = tuple(names[id(parameter)] for parameter in module.parameters())
                outlines[index] = replace(outlines[index], names=its_names)
        self._modules.clear()
        if partition_method.casefold() != "best":
            self._method = partition_method
        self._assign(topology, ranks, rank, given, outlines)
        for index in self._indices():
            self._keep(index, given[index], outlines[index], modules[index])
        self._whole = self._sample = None

    def _assign(
        self,
        topology: ProcessTopology,
        ranks: Sequence[int],
        pipeline_rank: int | None,
        layers: Sequence[Any],
        outlines: Sequence[LayerOutline],
    ) -> None:
        """Decide which layers this rank has."""
        self._topo = topology
        place = None if pipeline_rank is None else topology.filter_match(pipe=pipeline_rank)[0]
        self._grid = PipelineParallelGrid(topology, rank=place)
        self.stage_id, self.num_stages = self._grid.stage_id, len(ranks)
        self.stages = tuple(stage for stage, rank in enumerate(ranks) if rank == self.stage_id)
        num_ranks = max(topology.get_dim("pipe"), 1)
        if len(layers) < self.num_stages:
            raise _too_few_layers(len(layers), num_ranks, self.num_stages // num_ranks)
        world = current_world()
        self.parts = stage_bounds(
            self._method,
            layers,
            outlines,
            self.num_stages,
            sample=self._sample,
            device=world.device,
            virtual_stages=self.num_stages // num_ranks,
            checkpoint_interval=self.activation_checkpoint_interval,
        )
        if self._method == "time" and pipeline_rank is None:
            comm = world.communicator("world", Mesh.of(world.size), max_ctas=0)
            self.parts = comm.gather_objects(self.parts, label="pipeline stages")[0]
        self.tied = _tied(outlines, [self.stage_owner(index) for index in range(len(layers))])
        self._alike = [
            [other for other, known in enumerate(outlines) if known.names and known.built_by == of.built_by] or [index]
            for index, of in enumerate(outlines)
        ]
        self.tied_modules = nn.ModuleDict()
        self._layers: dict[int, list[_StageLayer]] = {stage: [] for stage in self.stages}
        self._num_runs = dict.fromkeys(self.stages, 0)

    @property
    def own_blocks(self) -> list[str]:
        names = dict.fromkeys(layer.module for layer in self._rank_layers())
        return [name for name in names if name is not None]

    def _indices(self) -> list[int]:
        """The layers of this rank's stages, by number."""
        return [i for stage in self.stages for i in range(self.parts[stage], self.parts[stage + 1])]

    def _rank_layers(self) -> list[_StageLayer]:
        return [layer for stage in self.stages for layer in self._layers[stage]]

    def _keep(self, index: int, layer: Any, known: LayerOutline, module: nn.Module | None) -> None:
        """Register a layer of this rank; a shared parameter under its name of the whole model."""
        name, function = None, layer.forward_fn if isinstance(layer, TiedLayerSpec) else layer
        if module is not None:
            key = layer.key if isinstance(layer, TiedLayerSpec) and known.tied_to is None else None
            name = str(index) if key is None else f"tied_modules.{key}"
            if key is None or key not in self.tied_modules:
                for canonical, (key_name, parameter) in zip(known.names, module.named_parameters(), strict=True):
                    if canonical != f"{name}.{key_name}":
                        self._register_shared(canonical, parameter)
                (self if key is None else self.tied_modules).add_module(key or name, module)
            if not isinstance(layer, TiedLayerSpec):
                function = None
        self._layers[self.stage_owner(index)].append(_StageLayer(index, name, function))

    def _register_shared(self, name: str, parameter: nn.Parameter) -> None:
        """Register a parameter of a layer that is on another rank, so that it has that layer's name here too."""
        *path, leaf = name.split(".")
        module: nn.Module = self
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        if leaf not in module._parameters:
            module.register_parameter(leaf, parameter)

    def forward(self, stage: int, received: Any, batch: Any, **arguments: Any) -> Any:
        """Apply the layers of one pipeline stage to what it received, or to the inputs of ``(inputs, labels)``.

        Args:
            arguments: of the curriculum; not used, since a layer takes one argument: the loader, or the function of
                ``set_batch_fn``, truncates inputs and labels.
        """
        value = _part(batch, 0) if stage == 0 else received
        self._num_runs[stage] += 1
        layers, num_runs = self._layers[stage], self._num_runs[stage]
        if stage > 0 and getattr(self._module(layers[0]), "inplace", False):  # autograd refuses it on a leaf
            value = tree_map_only(torch.Tensor, torch.Tensor.clone, value)
        interval = self.activation_checkpoint_interval
        for start in range(0, len(layers), interval or len(layers)):
            run = layers[start : start + (interval or len(layers))]
            if interval and self._is_checkpointable(run):
                value = self._checkpointed(run, value, num_runs)
            else:
                value = self._run(run, value, num_runs)
        return value

    def _run(self, layers: Sequence[_StageLayer], value: Any, num_runs: int) -> Any:
        for layer in layers:
            if self.seed_layers:
                self.seed_fn(self.base_seed * (num_runs + 1) + layer.index)
            value = self._call(layer)(value)
        return value

    def _checkpointed(self, layers: Sequence[_StageLayer], value: Any, num_runs: int) -> Any:
        is_tuple = isinstance(value, tuple)  # as arguments of their own: a reentrant function sees no tensor in a tuple

        def run(*inputs: Any) -> Any:
            return self._run(layers, inputs if is_tuple else inputs[0], num_runs)

        return self.activation_checkpoint_func(run, *(value if is_tuple else (value,)))

    def _call(self, layer: _StageLayer) -> Callable[[Any], Any]:
        if layer.module is None or layer.function is None:
            return cast("Callable[[Any], Any]", layer.function or self._module(layer))
        return partial(layer.function, self._module(layer))

    def _module(self, layer: _StageLayer) -> nn.Module | None:
        return None if layer.module is None else self.get_submodule(layer.module)

    def _is_checkpointable(self, layers: Sequence[_StageLayer]) -> bool:
        modules = [self._module(layer) for layer in layers]
        if self.checkpointable_layers is not None:
            return all(type(module).__name__ in self.checkpointable_layers for module in modules)
        return any(any(True for _ in module.parameters()) for module in modules if module is not None)

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        """``loss_fn`` of the output and the labels of ``(inputs, labels)``; without one, the output."""
        loss: torch.Tensor = output if self.loss_fn is None else self.loss_fn(output, _part(batch, 1))
        return loss

    def stage_parameters(self, stage: int) -> list[nn.Parameter]:
        """The parameters of a stage's layers, each once."""
        modules = [self._module(layer) for layer in self._layers[stage]]
        return list({id(p): p for module in modules if module is not None for p in module.parameters()}.values())

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees of the mesh in the topology, where they are above 1."""
        asked = {"pp": self._topo.get_dim("pipe"), "tp": self._topo.get_dim("model")}
        return {axis: degree for axis, degree in asked.items() if degree > 1}

    @property
    def forward_funcs(self) -> list[Callable[[Any], Any]]:
        """The functions that this rank calls, in the order of the layers."""
        return [self._call(layer) for layer in self._rank_layers()]

    def topology(self) -> ProcessTopology:
        return self._topo

    def mpu(self) -> PipelineParallelGrid:
        """The grid, which has the methods of Megatron's ``mpu``."""
        return self._grid

    def num_pipeline_stages(self) -> int:
        """The ranks along the pipeline."""
        return max(self._topo.get_dim("pipe"), 1)

    def partitions(self) -> list[int]:
        """Where each pipeline stage begins, and the end."""
        return self.parts

    def stage_owner(self, layer_idx: int) -> int:
        """The pipeline stage of a layer."""
        if not 0 <= layer_idx < self.parts[-1]:
            raise _wrong(f"stage_owner({layer_idx}) of {self.parts[-1]} layers.")
        return next(stage for stage, end in enumerate(self.parts[1:]) if layer_idx < end)

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> str:
        """The file of this rank's ``local_layer_idx``-th layer in a DeepSpeed checkpoint."""
        index = self._rank_layers()[local_layer_idx].index
        parts = [f"layer_{index:02d}", self._topo.get_rank_repr(self._grid.global_rank), "model_states.pt"]
        return str(Path(ckpt_dir) / "-".join(part for part in parts if part))

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> list[str]:
        """The files that are there of this rank's ``local_layer_idx``-th layer, one a tensor-parallel rank; sorted."""
        index = self._rank_layers()[local_layer_idx].index
        return [str(path) for path in sorted(Path(ckpt_dir).glob(f"layer_{index:02d}-*model_states.pt"))]

    def ckpt_prefix(self, checkpoints_path: str, tag: str | int) -> str:
        """``PATH/TAG/module-pipe_00-model_00``: this rank's coordinates on all axes but ``data``."""
        coordinate = self._topo.get_coord(self._grid.global_rank)._asdict()
        parts = [f"{axis}_{index:02d}" for axis, index in coordinate.items() if axis != "data"]
        return str(Path(checkpoints_path) / str(tag) / "-".join(["module", *parts]))

    def save_state_dict(self, save_dir: str, checkpoint_engine: Any, exclude_frozen_params: bool = False) -> None:
        """Write each of this rank's layers that is a module to ``ckpt_layer_path``; data-parallel rank 0 writes.

        Args:
            checkpoint_engine: its ``save(state_dict, path)`` writes; ``torch`` is one.

        Raises: UsageError: parameters are sharded (stage 3, zero.Init).
        """
        if self._grid.data_parallel_id != 0:
            return
        Path(save_dir).mkdir(parents=True, exist_ok=True)
        for position, module in self._modules_of_files():
            self._check_whole(module, "save_state_dict", "call engine.save_checkpoint(folder)")
            frozen = {name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
            excluded = frozen if exclude_frozen_params else set()
            state = {name: _copied(value) for name, value in module.state_dict().items() if name not in excluded}
            checkpoint_engine.save(state, self.ckpt_layer_path(save_dir, position))

    def load_state_dir(self, load_dir: str, checkpoint_engine: Any, strict: bool = True) -> None:
        """Load this rank's layers from what ``save_state_dict`` or DeepSpeed wrote, in any number of stages.

        Layers of a key of TiedLayerSpec are read from the first of them that has a file, so all stages agree.

        Args:
            checkpoint_engine: its ``load(path, map_location=)`` reads; ``torch`` is one.

        Raises: UsageError: after ``initialize``; sharded parameters; a layer without a file, or of another number of
            tensor-parallel ranks.
        """
        if self.has_engine:
            raise _wrong(
                "load_state_dir() after initialize() would not set the optimizer's main parameters.",
                "call it before initialize(), or engine.load_checkpoint(folder) after it.",
            )
        for position, module in self._modules_of_files():
            self._check_whole(module, "load_state_dir", "build the model outside of zero.Init")
            path = self._file_of(load_dir, position)
            state = checkpoint_engine.load(path, map_location="cpu")
            module.load_state_dict(state, strict=strict)

    def _file_of(self, folder: str, position: int) -> str:
        index = self._rank_layers()[position].index
        named = Path(self.ckpt_layer_path(folder, position)).name
        ending = named.removeprefix(f"layer_{index:02d}")
        for alike in self._alike[index]:
            files = [path.name for path in Path(folder).glob(f"layer_{alike:02d}-*model_states.pt")]
            is_split = len(files) != self._grid.slice_parallel_size
            if files and (is_split or f"layer_{alike:02d}{ending}" not in files):
                raise _wrong(
                    f"layer {alike} has the files {sorted(files)}, and there are {self._grid.slice_parallel_size} "
                    "tensor-parallel ranks.",
                    "call engine.load_checkpoint(folder) after initialize(), which loads at any number.",
                    where=str(folder),
                )
            if files:
                return str(Path(folder) / f"layer_{alike:02d}{ending}")
        raise _wrong(
            f"{named} of layer {index} is not there.",
            "give the folder that has the layer files: with DeepSpeed FOLDER/TAG.",
            where=str(folder),
        )

    def _modules_of_files(self) -> list[tuple[int, nn.Module]]:
        modules = enumerate(map(self._module, self._rank_layers()))
        return [(position, module) for position, module in modules if module is not None]

    def _check_whole(self, module: nn.Module, call: str, do: str) -> None:
        for name, parameter in module.named_parameters():
            if is_placeholder(parameter.data):
                raise _wrong(f"{call}(): {name} is sharded.", f"{do}.")

    def allreduce_tied_weight_gradients(self) -> None:
        """Raises: UsageError: the engine reduces gradients of tied weights itself."""
        raise _wrong(
            "allreduce_tied_weight_gradients(): the engine already adds up the gradients of tied weights.",
            "leave the call out; engine.train_batch() does it.",
        )

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, Any]]:
        """Raises: UsageError: there are no groups of tied weights to reduce over."""
        raise _wrong(
            f"get_tied_weights_and_groups(): the engine has its own communicators for {sorted(self.tied)}.",
            "read the names and stages of tied weights from module.tied; engine.train_batch() reduces them.",
        )

    def set_checkpoint_interval(self, interval: int) -> None:
        """Change ``activation_checkpoint_interval``, from the next forward on."""
        self.activation_checkpoint_interval = interval

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        """Additional losses to report, by name; override it in a derived class."""
        return None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """``torch.compile`` each layer."""
        for layers in self._layers.values():
            for place, layer in enumerate(layers):
                module = self._module(layer)
                if module is not None:
                    module.compile(*args, **kwargs)
                else:
                    layers[place] = replace(layer, function=torch.compile(layer.function, *args, **kwargs))


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def set_random_seed(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def _topology(num_stages: int | None, topology: ProcessTopology | None, pipeline_rank: int | None) -> ProcessTopology:
    if topology is not None:
        return topology
    assert num_stages is not None
    num_ranks = current_world().size if pipeline_rank is None else num_stages
    if num_stages < 1 or num_ranks % num_stages:
        fits = [str(n) for n in range(1, num_ranks + 1) if num_ranks % n == 0]
        raise _wrong(
            f"num_stages={num_stages} does not divide the {num_ranks} ranks.",
            f"use one of {', '.join(fits)}; or start a multiple of {max(num_stages, 1)} ranks.",
        )
    return PipeDataParallelTopology(num_pp=num_stages, num_dp=num_ranks // num_stages)


def _check_layers(layers: Sequence[Any]) -> None:
    for index, layer in enumerate(layers):
        is_layer = isinstance(layer, LayerSpec) or callable(layer)
        if not is_layer or isinstance(layer, StageModule | type):
            raise _wrong(
                f"layer {index} of {len(layers)} is {layer!r}.",
                "give modules, LayerSpec(class, arguments), TiedLayerSpec, or functions of one argument.",
            )


def _tied(outlines: Sequence[LayerOutline], stages: Sequence[int]) -> dict[str, tuple[int, ...]]:
    stages_of: dict[str, set[int]] = {}
    for known, stage in zip(outlines, stages, strict=True):
        for name in known.names:
            stages_of.setdefault(name, set()).add(stage)
    return {name: tuple(sorted(of)) for name, of in stages_of.items() if len(of) > 1}


def _part(batch: Any, index: int) -> Any:
    """The inputs (0) or the labels (1) of a micro-batch."""
    if not isinstance(batch, tuple | list) or len(batch) <= index:
        have = f"{len(batch)} parts" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"
        raise UsageError(
            f"a PipelineModule reads {'labels' if index else 'inputs'} from a micro-batch, which is {have}.",
            do="let the loader return (inputs, labels); inputs may be a tuple of tensors.",
            code="pipeline-batch",
        )
    return batch[index]


def _too_few_layers(num_layers: int, num_ranks: int, virtual_stages: int) -> UsageError:
    fits = [f"virtual_stages={num_layers // num_ranks}"] if virtual_stages > 1 and num_layers >= num_ranks else []
    return _wrong(
        f"{num_layers} layers cannot fill {num_ranks * virtual_stages} pipeline stages"
        + (f" ({num_ranks} ranks with {virtual_stages} each)." if virtual_stages > 1 else "."),
        "use " + " or ".join([*fits, f"num_stages={num_layers // virtual_stages or 1} at most"]) + ".",
    )


def _wrong(what: str, do: str = "", where: str = "") -> UsageError:
    return UsageError(what, where=where, do=do, code="pipeline-layers")
