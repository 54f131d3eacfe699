"""Layers of a pipeline: their specs, what is known of them without memory, and the modules built from them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from shoal.errors import ModelError, UsageError


class LayerSpec:
    """A layer that is built on the ranks that run it: ``typename(*module_args, **module_kwargs)``.

    >>> LayerSpec(nn.Linear, 4, 8, bias=False)
    Linear(4, 8, bias=False)

    Raises: UsageError: ``typename`` is not a class of modules.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise UsageError(
                f"{type(self).__name__} was given {typename!r}, which is not a class of torch.nn.Module.",
                do="give the class and its arguments; a function, or a module that is built, is a layer as it is.",
                code="pipeline-layers",
            )
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def __repr__(self) -> str:
        given = [repr(arg) for arg in self.module_args]
        given += [f"{name}={value!r}" for name, value in self.module_kwargs.items()]
        return f"{self.typename.__name__}({', '.join(given)})"

    def build(self, log: bool = False) -> nn.Module:
        """A new module."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that shares its parameters with all layers of the same key.

    The first layer of a key is built. Later ones of the same class are that module; one of another class is a module of
    its own, whose ``tied_weight_attr`` are the first one's parameters.

    Args:
        forward_fn: called with the module and its input, in place of the module.
        tied_weight_attr: the shared parameters, as dotted names; in one order in all layers of the key.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


def type_name(layer: Any) -> str:
    """What ``partition_method="type:..."`` is compared with: the name of a class, or of a function."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", type(layer).__name__)


@dataclass(frozen=True)
class LayerOutline:
    """A layer as far as every rank knows it, though only some build it.

    Attributes:
        names: of its parameters in the whole model; a shared one has the name of the first layer that has it.
        numel: of the parameters that require a gradient.
        built_by: the layer whose module this one runs: itself, or the first of its key.
        tied_to: the first layer of its key, if this one is a module of its own with that layer's parameters.
    """

    names: tuple[str, ...]
    numel: int
    built_by: int
    tied_to: int | None = None


def outline(layers: Sequence[Any]) -> list[LayerOutline]:
    """Read the layers' parameters. Specs are built on the meta device; one whose constructor needs values, as it is.

    Random states are restored.

    Raises: ModelError: layers of one key whose shared parameters differ.
    """
    outlines: list[LayerOutline] = []
    names: WeakIdKeyDictionary = WeakIdKeyDictionary()
    modules: dict[int, nn.Module] = {}  # kept: what shares a parameter is recognised by the parameter
    firsts = _first_of_key(layers)
    with torch.random.fork_rng(devices=[]):
        for index, layer in enumerate(layers):
            first = firsts.get(layer.key, index) if isinstance(layer, TiedLayerSpec) else index
            if first != index and layer.typename is layers[first].typename:
                outlines.append(LayerOutline(outlines[first].names, outlines[first].numel, first))
                continue
            module = _on_meta(layer) if isinstance(layer, LayerSpec) else layer
            if not isinstance(module, nn.Module):
                outlines.append(LayerOutline((), 0, index))
                continue
            if first != index:
                tie(module, layer, shared_parameters(modules[first], layers[first]), index)
            modules[index] = module
            prefix = str(index) if first != index or index not in firsts.values() else f"tied_modules.{layer.key}"
            its_names = [names.setdefault(p, f"{prefix}.{name}") for name, p in module.named_parameters()]
            numel = sum(p.numel() for p in module.parameters() if p.requires_grad)
            outlines.append(LayerOutline(tuple(its_names), numel, index, first if first != index else None))
    return outlines


def build(
    layers: Sequence[Any],
    outlines: Sequence[LayerOutline],
    wanted: Collection[int],
    seed: Callable[[int], None] | None = None,
) -> Iterator[tuple[int, nn.Module | None]]:
    """The index and the module of each wanted layer, in order; None for a function.

    Args:
        seed: called with the index before a layer is built, and then only what is wanted is built. Without it every
            spec is built, and dropped if it is not wanted: what is drawn for one layer depends on those before it.

    Memory: one layer that is not wanted, at a time.
    """
    needed = {outlines[index].built_by for index in wanted}
    sources = {outlines[index].tied_to for index in wanted} - {None}
    tied: dict[int, nn.Module] = {}
    shared: dict[int, list[nn.Parameter]] = {}
    for index, (layer, known) in enumerate(zip(layers, outlines, strict=True)):
        module = layer
        if known.built_by != index:
            module = tied.get(known.built_by)
        elif isinstance(layer, LayerSpec):
            if seed is not None:
                if index not in needed and index not in sources:
                    continue
                seed(index)
            module = layer.build()
            if isinstance(layer, TiedLayerSpec) and known.tied_to is not None and index in needed:
                tie(module, layer, shared[known.tied_to], index)
            if isinstance(layer, TiedLayerSpec) and index in sources:
                shared[index] = shared_parameters(module, layer)
            if index in needed and isinstance(layer, TiedLayerSpec):
                tied[index] = module
        if index in wanted:
            yield index, module if isinstance(module, nn.Module) else None


def tie(module: nn.Module, spec: TiedLayerSpec, parameters: Sequence[nn.Parameter], index: int) -> None:
    """Replace the module's ``tied_weight_attr`` by ``parameters``, wherever the module has them."""
    mine = shared_parameters(module, spec)
    if [p.shape for p in mine] != [p.shape for p in parameters]:
        raise ModelError(
            f"the layers of the key {spec.key!r} share {[tuple(p.shape) for p in parameters]}, and layer {index}"
            f" ({spec}) has {[tuple(p.shape) for p in mine]} as {', '.join(spec.tied_weight_attr)}.",
            do="name parameters of the same shapes in tied_weight_attr of all layers of the key.",
            code="pipeline-layers",
        )
    for old, new in zip(mine, parameters, strict=True):
        places = [(each, name) for each in module.modules() for name, p in each._parameters.items() if p is old]
        for each, name in places:
            setattr(each, name, new)


def shared_parameters(module: nn.Module, spec: TiedLayerSpec) -> list[nn.Parameter]:
    """The parameters that ``tied_weight_attr`` names."""
    try:
        return [module.get_parameter(name) for name in spec.tied_weight_attr]
    except AttributeError as error:
        raise ModelError(
            f"tied_weight_attr of {spec} (key {spec.key!r}) is {spec.tied_weight_attr}: {error}.",
            do="name its parameters: " + ", ".join(name for name, _ in module.named_parameters()),
            code="pipeline-layers",
        ) from None


def _first_of_key(layers: Sequence[Any]) -> dict[str, int]:
    firsts: dict[str, int] = {}
    for index, layer in enumerate(layers):
        if isinstance(layer, TiedLayerSpec):
            firsts.setdefault(layer.key, index)
    return firsts


def _on_meta(spec: LayerSpec) -> nn.Module:
    try:
        with torch.device("meta"):
            return spec.build()
    except (RuntimeError, NotImplementedError, ValueError, TypeError):  # the constructor reads values
        return spec.build()
