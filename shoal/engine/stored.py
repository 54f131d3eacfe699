"""What an engine writes, reads and moves: checkpoints, weights, batches, and states that leave the device."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from shoal.engine.data import make_loader
from shoal.engine.deepspeed_face import DeepSpeedFace

if TYPE_CHECKING:
    from shoal.engine.batch import Batch
    from shoal.engine.checkpointing import Checkpointing
    from shoal.engine.offload_states import OffloadStates


class StoredEngine(DeepSpeedFace):
    """The part of ``Engine`` beside the training step. Every rank makes each call."""

    if TYPE_CHECKING:
        checkpointing: Checkpointing
        offloaded: OffloadStates
        _batch: Batch

        def _check_alive(self) -> None: ...
        def _settle(self) -> None: ...

    # checkpoints

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything that a run needs to go on. Every rank calls.

        Args:
            save_dir: a folder that all ranks see, or an fsspec URL.
            tag: the checkpoint's name; None: ``global_step`` and the number of steps. A checkpoint of that name is
                replaced once the new one is whole.
            client_state: what ``load_checkpoint`` will give back: numbers, text, lists, dicts and tensors.
            save_latest: ``load_checkpoint`` without a tag may choose this one.

        Returns: was it saved? (With ``checkpoint.async_save``: was it begun?)
        Raises: CheckpointError: on every rank; older checkpoints and the running state are as they were.
        Communicates: what each rank wrote, as JSON; no parameter.
        Memory: one block of 4 MiB on the host; with ``checkpoint.async_save`` this rank's share of the state.
        """
        self._check_alive()
        self._settle()
        return self.checkpointing.save(
            save_dir, tag, client_state, save_latest=save_latest, exclude_frozen=exclude_frozen_parameters
        )

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, Any]:
        """Load a checkpoint that any layout saved, or one of DeepSpeed's, universal or not. Every rank calls.

        Args:
            load_dir: the folder that was saved to, or an fsspec URL; of DeepSpeed's checkpoints a local one.
            tag: its name; None: the newest that is whole, or the one of DeepSpeed's that ``latest`` names. With
                ``checkpoint.load_universal`` the one that ``latest_universal`` names.
            load_module_strict: False: parameters that only one side has are left out, and named.
            load_module_only: the weights alone; counters, optimizer and schedule stay as they are.
            custom_load_fn: called as ``custom_load_fn(src=values by name, dst=module)`` while the module is whole.

        Returns: the checkpoint's path, and the client state. (Both None where DeepSpeed's name is lent and none lies
        there.)
        Raises: CheckpointError: on every rank; nothing was changed.
        Communicates: one all_gather of the parameters where they rest whole; short messages.
        Memory: one block of 4 MiB on the host; of DeepSpeed's checkpoints one parameter.
        """
        self._check_alive()
        self._settle()
        self.offloaded.require("loading")
        load = self.checkpointing.load_if_there if self.follows_deepspeed else self.checkpointing.load
        return load(
            load_dir,
            tag,
            is_strict=load_module_strict,
            has_optimizer=load_optimizer_states,
            has_schedule=load_lr_scheduler_states,
            is_module_only=load_module_only,
            custom_load_fn=custom_load_fn,
        )

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the weights alone, in the parameters' own dtype. Every rank calls.

        Args:
            save_filename: safetensors, or with ``.bin``, ``.pt`` or ``.pth`` what ``torch.save`` of a state_dict gives.

        Communicates: at stage 3 an all_gather of each unit. Memory: the whole model on the host.
        """
        self._check_alive()
        self._settle()
        return self.weights.save(save_dir, save_filename, exclude_frozen=exclude_frozen_parameters)

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The model's whole values by name, on the host, on every rank. Every rank calls.

        Args:
            destination: a dict to put them in, which is then returned.
            prefix: goes before each name.
            keep_vars: DeepSpeed's; what comes out are copies always.

        Communicates: at stage 3 an all_gather of each unit. Memory: the whole model on the host.
        """
        self._check_alive()
        self._settle()
        found = self.weights.module_state_dict(exclude_frozen=exclude_frozen_parameters)
        named = {f"{prefix}{name}": value for name, value in found.items()}
        if destination is None:
            return named
        destination.update(named)
        return destination

    def load_module_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Set the model's values, and the master weights, from whole ones. Every rank calls with the same.

        Args:
            state_dict: values by name, or a dict that has them under ``"module"``, as DeepSpeed's model files do.
            fetch_z3_params: DeepSpeed's; sharded parameters are set at any stage without it.

        Raises: CheckpointError: missing, unexpected or of another shape; all of them.
        """
        self._check_alive()
        self._settle()
        self.offloaded.require("loading")
        inner = state_dict.get("module")
        if isinstance(inner, Mapping):
            state_dict = inner
        self.weights.load_module_state_dict(state_dict, is_strict=strict, custom_load_fn=custom_load_fn)

    # data

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = False,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """A loader whose batches are this rank's part of the data.

        Args:
            batch_size: samples of one batch of this rank; None: the micro-batch.
            route: "train" shuffles; anything else keeps the order.
            data_sampler: decides what this rank reads; None: samples are dealt out over the data-parallel ranks.
        """
        return make_loader(
            dataset,
            batch_size or self._batch.micro,
            self.axes.all,
            self._config_object,
            route=route,
            pin_memory=pin_memory,
            data_sampler=data_sampler,
            collate_fn=collate_fn,
            num_local_io_workers=num_local_io_workers,
        )

    # states that leave the device for a while

    def offload_states(
        self,
        include: Any = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states from the device to host memory until ``reload_states()``. Every rank calls, between two passes.

        Meanwhile ``save_checkpoint``, ``module_state_dict`` and the safe accessors work, those of gradients excepted;
        what needs a state that is away raises.

        Args:
            include: of ``optim_states``, ``hp_params`` (master weights), ``lp_params`` (the model's parameters),
                ``lp_grads``, ``contiguous_grad_buffer`` (buffers of communication and casts, given back, not copied):
                strings, or members of DeepSpeed's enum; None: all. What rests on host or disk already stays. Master
                weights that are the parameters' own memory move with ``lp_params``.
            device: ``cpu``.
            pin_memory: page-lock that memory, where the system allows it.
            non_blocking: no effect: copies are queued together, and the call returns when the device's memory is free.

        Raises: UsageError: inside a pass, while a unit is gathered, or names that there are not. OutOfMemoryError: the
            host has too little memory; nothing was moved.
        Communicates: nothing; waits until no peer reads what leaves.
        """
        self._check_alive()
        self._settle()
        self.offloaded.offload(include, device, is_pinned=pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Undo ``offload_states``: every bit is as it was. Nothing where nothing is away.

        Args:
            non_blocking: return while copies are under way; the device's later work waits for them.

        Raises: OutOfMemoryError: the device has too little memory; call it again when it has.
        """
        self._check_alive()
        self.offloaded.reload(is_blocking=not non_blocking)

    def empty_partition_cache(self) -> None:
        """Between two passes: release gathered parameters that nobody holds, and the allocator's unused memory."""
        self._check_alive()
        self.offloaded.empty_cache()
