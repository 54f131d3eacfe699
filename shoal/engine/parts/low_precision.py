"""``fp8``: linear layers and stacked experts that compute in few bits, in the steps that the schedule says.

The number of steps that are done decides, so a run that is resumed goes on as the one that was saved.
"""

from __future__ import annotations

import torch
from torch import nn

from shoal.engine.accumulation import Counters
from shoal.engine.log import say_on_rank_0
from shoal.engine.parts.part import ForwardInputs, Part
from shoal.engine.settings import Properties
from shoal.parallel.low_precision.groups import take_groups
from shoal.parallel.low_precision.layers import Layers, LowPrecisionLayers, largest_embedding, stacked_experts
from shoal.parallel.low_precision.products import LowPrecisionProducts
from shoal.parallel.low_precision.recipes import RECIPES
from shoal.parallel.products import LayerProducts
from shoal.parallel.recompute_blocks import find_blocks
from shoal.pipeline.stage import StageModule
from shoal.text import counted, listed

_BETWEEN_SEEDS = 1_000_003
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LowPrecision(Part):
    """The layers of one engine that compute in few bits.

    Communicates: at start-up, twice: names of layers and blocks, and what the devices can compute.
    """

    def __init__(self, model: nn.Module, properties: Properties, counters: Counters) -> None:
        section = properties.config.fp8
        assert section.recipe is not None
        self._model, self._counters, self._section = model, counters, section
        self._comm, device = properties.axes.world, properties.device.torch_device
        # Tensor-parallel ranks hold the same gradient of a layer that is not split, so they round it alike.
        mesh = properties.axes.mesh
        numbers = mesh.ranks_along("tp", self._comm.rank)[0], mesh.world_size + self._comm.rank
        self._generators = [(torch.Generator(device), number) for number in numbers]
        self._seeded_at = -1  # micro-step
        vocabulary = max(self._comm.gather_objects(largest_embedding(model), label="fp8 vocabulary"))
        blocks = find_blocks(model, model.own_blocks if isinstance(model, StageModule) else ())
        whole, split = (LowPrecisionProducts(RECIPES[section.recipe], generator) for generator, _ in self._generators)
        own = Layers.of(model, list(blocks), vocabulary)
        refusals = {str(dtype): why for dtype in _DTYPES if (why := whole.refusal(dtype, device)) is not None}
        every = self._comm.gather_objects([own.linears, own.blocks, refusals], label="fp8 layers")
        of_all = Layers.together(Layers(linears, tuple(blocks)) for linears, blocks, _ in every)
        chosen = of_all.chosen(section.modules, section.keep, section.keep_last_layers)
        refused = {name: why for *_, each in every for name, why in each.items()}
        whole.refused = split.refused = whole.refused | {dtype for dtype in _DTYPES if str(dtype) in refused}
        self._products = LayerProducts(whole), LayerProducts(split)
        modules = {name: module for name, module in model.named_modules() if name in own.linears}
        layers = {name: modules[name] for name in chosen if name in modules}
        self._installed = LowPrecisionLayers(layers, *self._products)
        refusal = refused.get(str(properties.plan.autocast_dtype or _dtype_of(model)))
        self.notes = self._notes(of_all, chosen, refusal)
        if any(stacked_experts(module) is not None for module in layers.values()):
            why = take_groups(whole, device)
            split.groups = whole.groups
            if refusal is None and why is not None:
                text = "each expert has products of its own, which are slow where experts are many and small"
                self.notes.append(f"fp8: {text}: {why}.")

    def _notes(self, layers: Layers, chosen: list[str], refusal: str | None) -> list[str]:
        section = self._section
        since = f" from step {section.from_step} on" if section.from_step else ""
        until = f" until step {section.until_step}" if section.until_step is not None else ""
        left = [name for name in layers.linears if name not in chosen]
        text = f"fp8: {counted(len(chosen), 'layer')} of {len(layers.linears)} in {section.recipe}{since}{until}"
        notes = [f"{text}; as they are: {listed(left, 3)}." if left else f"{text}."]
        if refusal is not None:
            notes.append(f"fp8: products are emulated in fp32, with the same numbers and without the speed: {refusal}.")
        return notes

    def before_forward(self, args: tuple[object, ...], kwargs: dict[str, object]) -> ForwardInputs | None:
        for products in self._products:
            products.is_on = self._is_on()
        if self._seeded_at != self._counters.micro_steps:
            self._seeded_at = self._counters.micro_steps
            for generator, number in self._generators:
                generator.manual_seed(_BETWEEN_SEEDS * self._seeded_at + number)
        return None

    def _is_on(self) -> bool:
        section, steps = self._section, self._counters.global_steps
        return section.from_step <= steps and (section.until_step is None or steps < section.until_step)

    def at_step(self, was_applied: bool) -> None:
        if self._products[0].is_on != self._is_on():
            what = "on" if self._is_on() else "off"
            text = f"fp8: {what} after step {self._counters.global_steps} ({self._section.recipe})."
            say_on_rank_0(self._comm.rank, text)

    def before_destroy(self) -> None:
        self._installed.remove()


def _dtype_of(model: nn.Module) -> torch.dtype | None:
    """The dtype in which the model computes; None: it has no parameters."""
    return next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), None)
