"""Shoal trains PyTorch models that do not fit, or do not go fast enough, on one device.

    import shoal
    engine, optimizer, loader, schedule = shoal.initialize(model=model, config="ds_config.json")
    loss = engine(batch)
    engine.backward(loss)
    engine.step()

The parts are imported when they are first used: ``import shoal`` takes a few milliseconds more than torch alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shoal.checkpoint import foreign
from shoal.compat.checkpoints import DEEPSPEED
from shoal.errors import ShoalError
from shoal.running import foreign_names
from shoal.version import __version__

if TYPE_CHECKING:
    from shoal import comm, data, errors, zero
    from shoal import models as models
    from shoal import optim as optim
    from shoal import parallel as parallel
    from shoal.checkpoint.loading_hf import load_hf
    from shoal.comm.world import init_distributed
    from shoal.config import add_config_arguments
    from shoal.engine.engine import Engine
    from shoal.engine.entry import initialize
    from shoal.engine.parts.part import Part
    from shoal.parallel import recompute as checkpointing
    from shoal.parallel.sequence.attention import attention
    from shoal.parallel.sequence.chunks import Documents
    from shoal.parallel.sequence.context import SequenceContext, sequence_parallel
    from shoal.pipeline.layers import LayerSpec, TiedLayerSpec
    from shoal.pipeline.module import PipelineModule
    from shoal.planner.search import plan
    from shoal.simulation.check import check_streams
    from shoal.simulation.dry_run import dry_run, dry_run_pipeline
    from shoal.simulation.verify import verify

__all__ = [
    "Documents",
    "Engine",
    "LayerSpec",
    "Part",
    "PipelineModule",
    "SequenceContext",
    "ShoalError",
    "TiedLayerSpec",
    "__version__",
    "add_config_arguments",
    "attention",
    "check_streams",
    "checkpointing",
    "comm",
    "data",
    "dry_run",
    "dry_run_pipeline",
    "errors",
    "init_distributed",
    "initialize",
    "load_hf",
    "plan",
    "sequence_parallel",
    "verify",
    "zero",
]

foreign.register(DEEPSPEED)
foreign_names.register("shoal.compat.native_names:advise")

_MODULES = {
    "Documents": "shoal.parallel.sequence.chunks",
    "Engine": "shoal.engine.engine",
    "LayerSpec": "shoal.pipeline.layers",
    "Part": "shoal.engine.parts.part",
    "PipelineModule": "shoal.pipeline.module",
    "SequenceContext": "shoal.parallel.sequence.context",
    "TiedLayerSpec": "shoal.pipeline.layers",
    "add_config_arguments": "shoal.config",
    "attention": "shoal.parallel.sequence.attention",
    "check_streams": "shoal.simulation.check",
    "dry_run": "shoal.simulation.dry_run",
    "dry_run_pipeline": "shoal.simulation.dry_run",
    "init_distributed": "shoal.comm.world",
    "initialize": "shoal.engine.entry",
    "load_hf": "shoal.checkpoint.loading_hf",
    "plan": "shoal.planner.search",
    "sequence_parallel": "shoal.parallel.sequence.context",
    "verify": "shoal.simulation.verify",
}
_PARTS = {
    **{name: f"shoal.{name}" for name in ("comm", "data", "errors", "models", "optim", "parallel", "zero")},
    "checkpointing": "shoal.parallel.recompute",
}


if not TYPE_CHECKING:  # a type checker would take every misspelt name for one of these

    def __getattr__(name: str) -> Any:
        """Import a part at its first use (PEP 562)."""
        if name in _PARTS:
            return import_module(_PARTS[name])
        if name in _MODULES:
            return vars(import_module(_MODULES[name]))[name]
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
