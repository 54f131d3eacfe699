"""What can be said of tensors of which a file gives no more than names: which are parameters, and which buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal.checkpoint.portable import About, TensorInfo

# PyTorch's own modules keep buffers of floating point under these names only.
_BUFFER_ENDINGS = (".running_mean", ".running_var", ".num_batches_tracked")


def about(
    tensors: Mapping[str, TensorInfo],
    path: str,
    aliases: Mapping[str, tuple[str, ...]] | None = None,
    known_parameters: Iterable[str] = (),
) -> About:
    """An ``About`` for bare tensors.

    A tensor counts as a parameter if it is of floating point and not one of PyTorch's running statistics. A buffer of
    floating point by another name counts as one too; a model that is filled from it takes it by name all the same.
    """
    known = set(known_parameters)
    parameters = {
        name: info
        for name, info in tensors.items()
        if name in known or (info.dtype.is_floating_point and not f".{name}".endswith(_BUFFER_ENDINGS))
    }
    return About(parameters=parameters, aliases=dict(aliases or {}), path=path)
