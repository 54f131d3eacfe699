"""Activation recompute under DeepSpeed's names: which functions run again in the backward pass, and what they save.

from shoal.parallel import recompute
x = recompute.checkpoint(block, x, mask=mask)

Each world has its configuration; without one, inputs stay where they are. The engine makes it from
``activation_checkpointing`` (``install``); ``configure`` replaces it for later calls of ``checkpoint``.
"""

from __future__ import annotations

import logging
import pathlib
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from shoal.comm.world import World, current_world
from shoal.config import Config, load
from shoal.config.schema import ActivationCheckpointing
from shoal.errors import NotBuiltError
from shoal.parallel.recompute_blocks import RecomputedBlocks
from shoal.parallel.recompute_blocks import recompute_blocks as _recompute_blocks
from shoal.parallel.rng_tracker import RngTracker
from shoal.parallel.segment import Recompute, RecomputeSettings, scoped_recompute, use_recompute
from shoal.parallel.selective import operations_of

__all__ = [
    "Recompute",
    "RecomputeSettings",
    "RecomputedBlocks",
    "checkpoint",
    "checkpoint_wrapped",
    "configure",
    "current_recompute",
    "get_cuda_rng_tracker",
    "install",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "recompute_blocks",
    "reset",
    "set_num_layers",
    "uninstall",
    "use_recompute",
]

logger = logging.getLogger("shoal")


class _Registry:
    """The configuration of each world, and the default one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.of_world: weakref.WeakKeyDictionary[World, Recompute] = weakref.WeakKeyDictionary()
        self.unconfigured = Recompute()
        self.is_plain = True  # no world's configuration differs from that one; a compiler can read it


_registry = _Registry()


def current_recompute() -> Recompute:
    """The configuration that ``checkpoint`` uses here.

    The first that applies: the one of ``use_recompute``; the one installed for this world; one that leaves inputs where
    they are.
    """
    scoped = scoped_recompute()
    if scoped is not None:
        return scoped
    with _registry.lock:
        if not _registry.of_world:
            return _registry.unconfigured
    world = current_world()
    with _registry.lock:
        return _registry.of_world.get(world, _registry.unconfigured)


def install(recompute: Recompute, world: World) -> None:
    """Make ``recompute`` the configuration of a world, in all threads that are in it."""
    with _registry.lock:
        _registry.of_world[world] = recompute
        _registry.is_plain = all(each.is_plain for each in _registry.of_world.values())


def uninstall(recompute: Recompute, world: World) -> None:
    """Undo ``install``, unless another was installed since."""
    with _registry.lock:
        if _registry.of_world.get(world) is recompute:
            del _registry.of_world[world]
        _registry.is_plain = all(each.is_plain for each in _registry.of_world.values())


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, without saving what the backward pass needs: it is computed again.

    Args:
        function: run twice; the second time with the same inputs, random states and autocast.
        kwargs: for the function; but ``preserve_rng_state``, ``context_fn``, ``determinism_check`` and ``early_stop``
            mean what they mean to ``torch.utils.checkpoint.checkpoint``.

    Returns: what the function gives.
    Raises: UsageError: an input was changed in place before the backward pass, or ``use_reentrant=True``.
    Memory: the tensors among the arguments, and in tuples among them, until the backward pass; the configuration says
        where. Nothing is saved inside another segment or without gradients (``torch.no_grad``).
    Communicates: what the function does, a second time; with partitioned inputs an all_gather of each.
    """
    if torch.compiler.is_compiling() and _registry.is_plain:
        return _registry.unconfigured.run("", function, args, kwargs)
    return current_recompute().checkpoint(function, *args, **kwargs)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """``checkpoint``, which never runs a backward pass inside another."""
    return checkpoint(function, *args)


def checkpoint_wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, recomputed at each call under the configuration that is current then."""

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(function, *args, **kwargs)

    # As functools.wraps sets it; mypy knows no such attribute of a function.
    recomputed.__wrapped__ = function  # type: ignore[attr-defined]
    recomputed.__qualname__ = getattr(function, "__qualname__", type(function).__qualname__)
    return recomputed


def recompute_blocks(
    model: Any, classes: Any = None, *, every: int = 1, recompute: Recompute | None = None
) -> RecomputedBlocks:
    """Recompute modules of a model without editing it; see ``shoal.parallel.recompute_blocks``.

    Args:
        recompute: the configuration; None: the current one.
    """
    return _recompute_blocks(model, classes, every=every, recompute=recompute or current_recompute())


def configure(
    mpu_: Any = None,
    deepspeed_config: str | pathlib.Path | dict[str, Any] | Config | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set what ``checkpoint`` does with the inputs that it saves. Arguments win over the config.

    Args:
        mpu_: says how many model-parallel ranks there are.
        deepspeed_config: whose section ``activation_checkpointing`` counts: a path, a dict, JSON text, or what
            ``shoal.config.load`` gave; None: the defaults.
        partition_activations: each model-parallel rank stores its share; no effect with one such rank.
        contiguous_checkpointing: no effect: saved inputs are left to the allocator, which reuses its blocks.
        num_checkpoints: no effect: no memory is reserved in advance.
        checkpoint_in_cpu: in host memory.
        synchronize: no effect: copies and gathers are waited for on the device, in its own order.
        profile: measure the time of each segment: ``current_recompute().times.take()``.

    Raises: ConfigError: the config. NotBuiltError: partitioned activations and more than one model-parallel rank.
    """
    section = ActivationCheckpointing()
    if deepspeed_config is not None:
        config = deepspeed_config
        if not isinstance(config, Config):
            config = load(config, world_size=current_world().size, replaced=("optimizer", "scheduler"))
        section = config.activation_checkpointing

    def asked(argument: Any, key: Any) -> Any:
        return key if argument is None else argument

    settings = RecomputeSettings(
        is_offloaded=asked(checkpoint_in_cpu, section.cpu_checkpointing),
        is_partitioned=asked(partition_activations, section.partition_activations),
        has_times=asked(profile, section.profile),
        operations=operations_of(section.policy),
    )
    degree, _ = _model_parallel(mpu_)
    if settings.is_partitioned and degree > 1:
        raise NotBuiltError(
            f"partition_activations with {degree} model-parallel ranks is not built yet.",
            do="leave partition_activations out; checkpoint_in_cpu saves more device memory.",
        )
    notes = []
    if asked(contiguous_checkpointing, section.contiguous_memory_optimization):
        notes.append("contiguous_checkpointing: no effect: saved inputs are left to the allocator.")
    if asked(num_checkpoints, section.number_checkpoints) is not None:
        notes.append("num_checkpoints: no effect: no memory is reserved in advance.")
    if asked(synchronize, section.synchronize_checkpoint_boundary):
        notes.append("synchronize: no effect: the device's own order suffices.")
    _install_here(settings, notes)


def is_configured() -> bool:
    """True if ``configure`` was called in this world, or an engine configured it."""
    return current_recompute() is not _registry.unconfigured


def reset() -> None:
    """Free device memory of copies under way. Call it after forward passes that no backward pass follows."""
    current_recompute().reset()


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Change ``partition_activations`` and nothing else; no effect with one model-parallel rank."""
    _install_here(replace(current_recompute().settings, is_partitioned=partition_activation))


def set_num_layers(nlayers: int) -> None:
    """No effect: DeepSpeed sizes its contiguous buffers by it, and here no memory is reserved in advance."""
    _say([f"set_num_layers({nlayers}): no effect: no memory is reserved in advance."])


def get_cuda_rng_tracker() -> RngTracker:
    """The named random states of this world's configuration; restored for each recomputation.

    They are the accelerator's, or the CPU's where there is none.
    """
    if not is_configured():
        _install_here(RecomputeSettings())  # states must not be shared by worlds that configured nothing
    return current_recompute().rng


def model_parallel_cuda_manual_seed(seed: int, mpu_: Any = None) -> None:
    """Seed the device's generator with ``seed``, and the tracker's model-parallel state with ``seed + 2718 + rank``.

    Args:
        mpu_: says this rank's number among the model-parallel ones; None: 0.
    """
    _, rank = _model_parallel(mpu_)
    get_cuda_rng_tracker().seed_model_parallel(seed, rank)


def _install_here(settings: RecomputeSettings, notes: Sequence[str] = ()) -> None:
    """Configure this world, whose named random states stay."""
    recompute = Recompute(settings, rng=current_recompute().rng if is_configured() else None)
    install(recompute, current_world())
    _say([*recompute.notes(), *notes])


def _say(notes: list[str]) -> None:
    if current_world().rank == 0:
        for note in notes:
            logger.info(note)


def _model_parallel(mpu: Any) -> tuple[int, int]:
    """Degree and this rank's number, from an object with Megatron's methods; newer names first."""
    if hasattr(mpu, "get_tensor_model_parallel_world_size"):
        return int(mpu.get_tensor_model_parallel_world_size()), int(mpu.get_tensor_model_parallel_rank())
    if hasattr(mpu, "get_model_parallel_world_size"):
        return int(mpu.get_model_parallel_world_size()), int(mpu.get_model_parallel_rank())
    return 1, 0
