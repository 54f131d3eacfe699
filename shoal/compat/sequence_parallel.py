"""DeepSpeed's sequence parallelism: its groups, ``DistributedAttention``, and what Accelerate and Trainer use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from shoal.comm.protocol import Communicator
from shoal.comm.world import World, communicator_of, current_world
from shoal.device import numbers_on
from shoal.errors import UsageError
from shoal.mesh import Mesh
from shoal.parallel.sequence.context import SequenceContext, set_sequence_context
from shoal.parallel.sequence.huggingface import register
from shoal.parallel.sequence.ulysses import HeadExchange, split_heads

_IGNORED_LABEL = -100


class SequenceParallelUnit:
    """The ``mpu`` of sequence parallelism: Megatron's protocol for its axes. ``sp`` neighbours share a sequence.

    Communicates: every rank makes it: the process groups are made.
    """

    def __init__(self, world: World, sp: int) -> None:
        self._world = world
        self.mesh = Mesh.of(world.size, sp=sp)
        self.communicator = world.communicator("sp", self.mesh)
        self._groups = {axis: world.process_group(axis, self.mesh) for axis in ("sp", "dp", "world")}

    def get_sequence_parallel_group(self) -> Any:
        return self._groups["sp"]

    def get_sequence_parallel_world_size(self) -> int:
        return self.mesh.sp

    def get_sequence_parallel_rank(self) -> int:
        return self.mesh.index("sp", self._world.rank)

    def get_data_parallel_group(self) -> Any:
        return self._groups["dp"]

    def get_data_parallel_world_size(self) -> int:
        return self.mesh.dp

    def get_data_parallel_rank(self) -> int:
        return self.mesh.index("dp", self._world.rank)

    def get_sequence_data_parallel_group(self) -> Any:
        """The ranks that shard the parameters: all."""
        return self._groups["world"]

    def get_sequence_data_parallel_world_size(self) -> int:
        return self._world.size

    def get_sequence_data_parallel_rank(self) -> int:
        return self._world.rank


_units: WeakKeyDictionary[World, SequenceParallelUnit] = WeakKeyDictionary()


def current_unit() -> SequenceParallelUnit | None:
    """What ``initialize_sequence_parallel`` made in this world; None: nothing."""
    return _units.get(current_world())


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Let every ``sequence_parallel_size`` neighbours share a sequence, for all attention of Shoal in this process.

    Communicates: start-up messages: every rank calls.
    """
    world = current_world()
    unit = _units[world] = SequenceParallelUnit(world, sequence_parallel_size)
    world.mesh = unit.mesh
    set_sequence_context(SequenceContext(sp=unit.communicator))


def _unit() -> SequenceParallelUnit:
    unit = current_unit()
    if unit is None:
        raise UsageError(
            "sequence parallelism is not initialised",
            do="call initialize_sequence_parallel(size) or UlyssesSPAttentionHF.register_with_transformers(...) first.",
            code="sequence-not-initialised",
        )
    return unit


def _of_unit(name: str) -> Callable[[], Any]:
    """The function of ``parallel_state_sp`` that calls the unit's method of the same name."""

    def get() -> Any:
        return getattr(_unit(), name)()

    get.__name__ = get.__qualname__ = name
    return get


get_sequence_parallel_group = _of_unit("get_sequence_parallel_group")
get_sequence_parallel_world_size = _of_unit("get_sequence_parallel_world_size")
get_sequence_parallel_rank = _of_unit("get_sequence_parallel_rank")
get_sequence_data_parallel_group = _of_unit("get_sequence_data_parallel_group")
get_sequence_data_parallel_world_size = _of_unit("get_sequence_data_parallel_world_size")
get_sequence_data_parallel_rank = _of_unit("get_sequence_data_parallel_rank")


class DistributedAttention(nn.Module):
    """Any attention over the whole sequence, for this rank's heads, between two all-to-alls.

    ``scatter_idx`` is the dim of the heads, ``gather_idx`` that of the positions. Without a process group all ranks
    share a sequence.
    """

    def __init__(
        self,
        local_attention: Any,
        sequence_process_group: Any,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
    ) -> None:
        super().__init__()
        self.local_attn = local_attention
        self.spg = sequence_process_group
        self.scatter_idx = scatter_idx
        self.gather_idx = gather_idx
        self._comm = communicator_of(sequence_process_group)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, rotary_pos_emb: Any = None, **kwargs: Any
    ) -> Tensor:
        """The output for this rank's positions and all heads, as ``local_attention`` gives it.

        Communicates: two all-to-alls, two in backward.
        """
        if args and type(args[0]) is int:  # DeepSpeed's ``batch_dim_idx``, which is not needed
            args = args[1:]
        kwargs.pop("batch_dim_idx", None)
        if rotary_pos_emb is not None:
            raise UsageError(
                "DistributedAttention was given rotary_pos_emb",
                do="rotate query and key before the call, by this rank's positions.",
                code="sequence-attention",
            )
        if self._comm.size == 1:
            alone: Tensor = self.local_attn(query, key, value, *args, **kwargs)
            return alone
        lengths = (query.shape[self.gather_idx],) * self._comm.size
        exchange = HeadExchange(self._comm, lengths, self.scatter_idx, self.gather_idx)
        heads = split_heads(query.shape[self.scatter_idx], key.shape[self.scatter_idx], self._comm.size)
        query, key, value = exchange.to_heads(
            (query, key, value), (heads.queries, heads.keys, heads.keys), "DistributedAttention: heads"
        )
        own = heads.key_of_query(self._comm.rank)
        if [own.count(head) for head in set(own)] != [len(own) // len(set(own))] * len(set(own)):
            index = numbers_on(key.device, own)
            key, value = key.index_select(self.scatter_idx, index), value.index_select(self.scatter_idx, index)
        out = self.local_attn(query, key, value, *args, **kwargs)
        return exchange.to_positions(out, heads.queries, "DistributedAttention: positions")


class UlyssesSPAttentionHF:
    """Ulysses in models of transformers."""

    @staticmethod
    def register_with_transformers(
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> SequenceParallelUnit | None:
        """Make ``core_attn_implementation`` of transformers attention over neighbouring ranks.

        Args:
            model_name_or_path: a model, or what ``AutoConfig.from_pretrained`` takes.
            core_attn_implementation: ``sdpa`` or ``flex_attention``: ``shoal.attention`` computes, with packed rows,
                sliding windows and soft caps; or another name that transformers knows.
            seq_length, max_length: of whole sequences, checked where ``seq_length_is_variable`` is False.
            disable_in_eval: modules in eval mode compute on one rank.

        Returns: the ``mpu`` for ``initialize``; None for a size of 1.
        Raises: UsageError: a name that is not there, fewer heads than ranks, a length that does not divide.
        Communicates: start-up messages: every rank calls.
        """
        if sequence_parallel_size == 1:
            return None
        from transformers import AutoConfig
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        config = getattr(model_name_or_path, "config", None)
        config = AutoConfig.from_pretrained(model_name_or_path) if config is None else config
        if core_attn_implementation not in ALL_ATTENTION_FUNCTIONS:
            raise UsageError(
                f"Transformers has no attention function called {core_attn_implementation!r}",
                do=f"use one of {', '.join(sorted(ALL_ATTENTION_FUNCTIONS))}.",
                code="sequence-core",
            )
        text = config.get_text_config()
        heads = text.num_attention_heads
        split_heads(heads, getattr(text, "num_key_value_heads", None) or heads, sequence_parallel_size)
        length = seq_length or max_length
        if not seq_length_is_variable and length is not None and length % sequence_parallel_size:
            raise _does_not_divide(length, sequence_parallel_size)
        # Transformers' flex attention takes causality from a mask of whole rows, which no rank has.
        core = None if core_attn_implementation in ("sdpa", "flex_attention") else core_attn_implementation
        register(core_attn_implementation, core=core, only_training=disable_in_eval)
        initialize_sequence_parallel(sequence_parallel_size)
        return current_unit()


class UlyssesSPDataLoaderAdapter:
    """A data loader's batches, each cut along the sequence over the ranks that share it.

    Every rank's loader gives batches of its own. From one of each the ranks make ``sp_world_size`` batches, in turn: of
    rank 0's batch every rank gets its positions, then of rank 1's. ``labels`` become ``shift_labels``: the label of a
    position is that of the next one, which may be on another rank. ``position_ids`` are added where there are none.
    Rows that do not divide by the ranks are padded: by labels of -100, zeros, and positions that begin again from 0, so
    that padding is a document of its own. Attributes are the loader's.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        self.dl = dl
        self.sp_rank = sp_rank
        self.sp_group = sp_group
        self.sp_world_size = sp_world_size
        self.device = device
        self._comm: Communicator = communicator_of(sp_group)
        self._batches: Iterator[dict[str, Any]] | None = None

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "dl":
            raise AttributeError(name)
        return getattr(self.dl, name)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """
        Communicates: for each batch of the loader its description, and an all-to-all for each tensor of it.
        Raises: UsageError: batches with different keys; on all ranks.
        """
        for batch in self.dl:
            yield from self._cut(batch)

    def __next__(self) -> dict[str, Any]:
        """The next batch; after the last one StopIteration, and then again the first."""
        if self._batches is None:
            self._batches = iter(self)
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = None
            raise

    def _cut(self, batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        own = {key: _on(value, self.device) for key, value in batch.items()}
        if isinstance(own.get("labels"), Tensor):
            labels = own.pop("labels")
            own["shift_labels"] = nn.functional.pad(labels, (0, 1), value=_IGNORED_LABEL)[..., 1:]
        ids = own.get("input_ids")
        if isinstance(ids, Tensor) and "position_ids" not in own:
            # A model would count each rank's positions from 0.
            own["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape[:2])
        length = _length_of(_described(own))
        own = {key: _padded(key, value, length, -length % self._comm.size) for key, value in own.items()}
        described = self._comm.gather_objects(_described(own), label="batches")
        if len({tuple(sorted(each)) for each in described}) > 1:
            raise UsageError(
                f"the ranks of a sequence have batches with different keys: {[sorted(each) for each in described]}",
                do="give all ranks' data loaders the same collator.",
                code="sequence-batches",
            )
        lengths = [_length_of(each) for each in described]
        cut: list[dict[str, Any]] = [{} for _ in described]
        for key in sorted(own):
            if isinstance(own[key], Tensor):
                shapes = [each[key]["shape"] for each in described]
                values = self._exchange(own[key], shapes, lengths, key)
            else:
                values = [each[key]["value"] for each in described]
            for of_source, value in zip(cut, values, strict=True):
                of_source[key] = value
        yield from cut

    def _exchange(self, tensor: Tensor, shapes: list[list[int]], lengths: list[int], key: str) -> list[Tensor]:
        """This rank's positions of every rank's tensor; all of a tensor that has no positions."""
        comm = self._comm
        has_positions = [_has_positions(shape, length) for shape, length in zip(shapes, lengths, strict=True)]
        parts = tensor.chunk(comm.size, 1) if has_positions[comm.rank] else (tensor,) * comm.size
        source = torch.cat([part.reshape(-1) for part in parts]).contiguous().view(torch.uint8)
        received = [
            torch.Size([shape[0], length // comm.size, *shape[2:]] if is_cut else shape)
            for shape, length, is_cut in zip(shapes, lengths, has_positions, strict=True)
        ]
        sizes = [shape.numel() * tensor.itemsize for shape in received]
        out = torch.empty(sum(sizes), dtype=torch.uint8, device=tensor.device)
        own = [source.numel() // comm.size] * comm.size
        comm.blocking.all_to_all(out, source, out_splits=sizes, source_splits=own, label=f"batches: {key}")
        return [part.view(tensor.dtype).view(shape) for part, shape in zip(out.split(sizes), received, strict=True)]


def _on(value: Any, device: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _described(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: {"shape": list(value.shape)} if isinstance(value, Tensor) else {"value": value}
        for key, value in batch.items()
    }


def _padded(key: str, value: Any, length: int, missing: int) -> Any:
    """What has ``length`` positions, with ``missing`` further ones that are no targets."""
    if not missing or not isinstance(value, Tensor) or not _has_positions(list(value.shape), length):
        return value
    shape = value.shape[0], missing, *value.shape[2:]
    if key == "position_ids":
        more = torch.arange(missing, dtype=value.dtype, device=value.device).expand(shape)
    else:
        more = value.new_full(shape, _IGNORED_LABEL if key.endswith("labels") else 0)
    return torch.cat([value, more], 1)


def _length_of(described: Mapping[str, Any]) -> int:
    """The positions of a batch: of ``input_ids``, else of the first tensor that has them."""
    shapes = [described[key]["shape"] for key in ("input_ids", *described) if "shape" in described.get(key, {})]
    return next((shape[1] for shape in shapes if len(shape) > 1), 0)


def _has_positions(shape: list[int], length: int) -> bool:
    return len(shape) > 1 and shape[1] == length


def _does_not_divide(length: int, ranks: int) -> UsageError:
    missing = -length % ranks
    return UsageError(
        f"a sequence of {length} positions does not divide by {ranks} ranks",
        do=f"pad it by {missing} to {length + missing} (pad_to_multiple_of={ranks} in the collator).",
        code="sequence-length",
    )
