"""The model's forward compiled by ``torch.compile``, as a call or the config's section ``compile`` says.

CUDA graphs are PyTorch's own, one for each block and pass. They read parameters, and write what they return, at the
addresses of their recording. So parameters must stay where they are, and nothing may read on another stream what a
graph has returned: PyTorch does not know when that has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from shoal.compiler import GRAPH_STEPS, num_compiled_graphs, untraced, with_cuda_graphs
from shoal.config import Config
from shoal.engine.parts.part import Part
from shoal.engine.settings import Plan, Properties
from shoal.errors import ModelError
from shoal.parallel.recompute_blocks import find_blocks
from shoal.running.hooks import tensors_in
from shoal.streams import simulation

logger = logging.getLogger("shoal")

_MODES_WITH_GRAPHS = ("reduce-overhead", "max-autotune")


class CompiledModel:
    """What of ``module`` is compiled. Whatever Shoal has compiled by the config, ``undo`` makes as it was.

    Raises: ModelError: CUDA graphs that this configuration cannot have; so does each method that compiles.
    """

    def __init__(self, module: nn.Module, properties: Properties) -> None:
        self._module = module
        self._properties = properties
        self._by_config: list[nn.Module] = []
        self._hooks: list[RemovableHandle] = []
        self._returned: set[int] = set()  # storages that CUDA graphs have returned in a forward pass
        self.has_cuda_graphs = False
        self._find_cuda_graphs()

    def __bool__(self) -> bool:
        """True if the forward was compiled, as a whole or by blocks."""
        return bool(self._by_config) or self._module._compiled_call_impl is not None

    def compile_module(self, backend: Any, options: Mapping[str, Any]) -> None:
        self._module.compile(**{"backend": backend, **options})
        try:
            self._find_cuda_graphs()
        except ModelError:
            self._module._compiled_call_impl = None
            raise

    def compile_as_configured(self) -> str:
        """Compile what the section ``compile`` names. Returns: a line for start-up."""
        section = self._properties.config.compile
        named = find_blocks(self._module) if section.regional else {}
        blocks = list(named.values())
        if (simulated := simulation()) is not None:
            if simulated.is_timed_gpu and section.mode in _MODES_WITH_GRAPHS:
                refuse_cuda_graphs(list(named) or [""], self._properties.config, self._properties.plan)
                simulated.note_cuda_graphs()
            return "compile: no effect in a simulation, which reads each operator; is_fused=True is the compiled time."
        for module in blocks or [self._module]:
            if module._compiled_call_impl is None:
                module.compile(mode=section.mode)
                self._by_config.append(module)
        try:
            self._find_cuda_graphs()
        except ModelError:
            self.undo()
            raise
        what = f"{len(blocks)} blocks" if blocks else f"the whole model ({type(self._module).__name__})"
        return f'compile: {what} by torch.compile(mode="{section.mode}"), in the first steps, which take longer.'

    def check_first_step(self) -> None:
        """Log a warning if the section ``compile`` had no effect: the compiler has found no graph in this process."""
        if self._by_config and self._properties.world.rank == 0 and not num_compiled_graphs():
            logger.warning(
                "compile: nothing was compiled in the first step, which ran as if compile.enabled were false: the"
                " compiler gave up each of the %d modules. TORCH_LOGS=graph_breaks shows where.",
                len(self._by_config),
            )

    def undo(self) -> None:
        """Modules that the config compiled run uncompiled again. Idempotent."""
        for module in self._by_config:
            module._compiled_call_impl = None
        self._by_config.clear()
        self._unhook()

    def _unhook(self) -> None:
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()

    def _find_cuda_graphs(self) -> None:
        properties = self._properties
        if simulation() is not None:  # it runs what is compiled uncompiled
            return
        names = with_cuda_graphs(self._module, properties.device.torch_device)
        refuse_cuda_graphs(names, properties.config, properties.plan)
        self.has_cuda_graphs = bool(names)
        self._unhook()
        for name in names:
            self._hooks.append(self._module.get_submodule(name).register_forward_hook(untraced(self._note)))
        if names:
            self._hooks.append(self._module.register_forward_hook(untraced(self._clone)))

    def _note(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self._returned.update(tensor.untyped_storage()._cdata for tensor in tensors_in(output))

    def _clone(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """The model's output, which the script may keep, in memory that no step of graphs overwrites."""

        def clone(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone() if tensor.untyped_storage()._cdata in self._returned else tensor

        kept = pytree.tree_map_only(torch.Tensor, clone, output)
        self._returned.clear()
        return kept


class CompiledSteps(Part):
    """Tells CUDA graphs where a step, whose micro-batches share memory, begins and ends; checks the first step."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._has_stepped = False

    def prepare(self, engine: Any) -> None:
        self._engine = engine

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._engine.compiled.has_cuda_graphs:
            GRAPH_STEPS.begin(self, is_training=torch.is_grad_enabled())

    def after_step(self) -> None:
        GRAPH_STEPS.end(self)
        if not self._has_stepped:
            self._has_stepped = True
            self._engine.compiled.check_first_step()

    def after_destroy(self) -> None:
        GRAPH_STEPS.end(self)


def refuse_cuda_graphs(names: Sequence[str], config: Config, plan: Plan) -> None:
    """
    Args:
        names: of the modules that are compiled with CUDA graphs.

    Raises: ModelError: there are some, and this configuration cannot have them.
    """
    inside = [axis for axis in ("tp", "sp", "cp") if getattr(plan.mesh, axis) > 1]
    inside += ["experts"] if config.expert_parallel.enabled else []
    obstacles = {
        "ZeRO stage 3 frees parameters after use, and gathers them at other addresses": plan.zero.stage >= 3,
        "pipeline stages send what a block returns on another stream": plan.mesh.pp > 1,
        "offload_activation copies on another stream what a graph saves": config.offload_activation.device == "cpu",
        f"{', '.join(inside)}: collectives divide a block into several graphs, what they return has no fixed address,"
        " and PyTorch would record again in each step": bool(inside),
        "progressive_layer_drop leaves blocks out: each choice of blocks would be recorded": (
            config.progressive_layer_drop.enabled
        ),
    }
    if names and True in obstacles.values():
        shown = ", ".join(name or "the whole model" for name in names[:4]) + (" ..." if len(names) > 4 else "")
        raise ModelError(
            f"{len(names)} modules are compiled with CUDA graphs, which need memory at fixed addresses: {shown}.",
            where="; ".join(obstacle for obstacle, is_there in obstacles.items() if is_there),
            do='compile with mode="default" or "max-autotune-no-cudagraphs", or train at stage 2 without these.',
            code="model-cuda-graphs",
        )
