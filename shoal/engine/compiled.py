"""The model's forward compiled by ``torch.compile``, as a call or the config's section ``compile`` says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from shoal.compiler import refuse_cuda_graphs
from shoal.engine.settings import Properties
from shoal.errors import ModelError
from shoal.parallel.recompute_blocks import find_blocks
from shoal.streams import simulation


class CompiledModel:
    """What of ``module`` is compiled. Whatever Shoal has compiled by the config, ``undo`` makes as it was."""

    def __init__(self, module: nn.Module, properties: Properties) -> None:
        self._module = module
        self._properties = properties
        self._by_config: list[nn.Module] = []

    def __bool__(self) -> bool:
        """True if the forward was compiled, as a whole or by blocks."""
        return bool(self._by_config) or self._module._compiled_call_impl is not None

    def compile_module(self, backend: Any, options: Mapping[str, Any]) -> None:
        """Raises: ModelError: CUDA graphs at stage 3."""
        self._module.compile(**{"backend": backend, **options})
        try:
            self._refuse_cuda_graphs()
        except ModelError:
            self._module._compiled_call_impl = None
            raise

    def compile_as_configured(self) -> str:
        """Compile what the section ``compile`` names. Returns: a line for start-up.

        Raises: ModelError: CUDA graphs at stage 3.
        """
        section = self._properties.config.compile
        if simulation() is not None:
            return "compile: no effect in a simulation, which reads each operator; is_fused=True is the compiled time."
        blocks = list(find_blocks(self._module).values()) if section.regional else []
        for module in blocks or [self._module]:
            if module._compiled_call_impl is None:
                module.compile(mode=section.mode)
                self._by_config.append(module)
        try:
            self._refuse_cuda_graphs()
        except ModelError:
            self.undo()
            raise
        what = f"{len(blocks)} blocks" if blocks else f"the whole model ({type(self._module).__name__})"
        return f'compile: {what} by torch.compile(mode="{section.mode}"), in the first steps, which take longer.'

    def undo(self) -> None:
        """Modules that the config compiled run uncompiled again. Idempotent."""
        for module in self._by_config:
            module._compiled_call_impl = None
        self._by_config.clear()

    def _refuse_cuda_graphs(self) -> None:
        refuse_cuda_graphs(self._module, self._properties.stage, self._properties.device.torch_device)
