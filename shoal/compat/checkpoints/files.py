"""Which files a DeepSpeed checkpoint consists of, and which kinds of checkpoints are not read yet.

    FOLDER/latest                                                       the tag, as text
    FOLDER/TAG/mp_rank_00_model_states.pt                               stages 0 to 2: weights, counters, client state
    FOLDER/TAG/zero_pp_rank_R_mp_rank_00_model_states.pt                stage 3: the same, by rank, with no weights
    FOLDER/TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt         stages 1 to 3: rank R's part of the state
    FOLDER/TAG/layer_L_expert_E_..., expp_rank_R_...                    of experts: see experts
    FOLDER/TAG/layer_00-[model_00-]model_states.pt                      of a pipeline: see pipeline
    FOLDER/latest_universal, FOLDER/TAG/zero                            of its universal format: see universal

R counts the data-parallel ranks. The number after ``mp_rank`` is the tensor-parallel rank, which has files of its own.
"""

from __future__ import annotations

import os
import re
import threading
import zipfile
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path, PosixPath, PurePosixPath
from types import SimpleNamespace
from typing import Any, Self

import torch

from shoal.checkpoint.formats.torch_file import load
from shoal.checkpoint.problems import damaged_copy, unsafe
from shoal.checkpoint.storage import LocalStorage, open_storage
from shoal.compat.checkpoints import UNIVERSAL
from shoal.errors import CheckpointError, NotBuiltError

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)(?P<more>_\d+)?_model_states\.pt")
_OPTIMIZER = re.compile(
    r"(?P<prefix>(?:bf16_|fp16_)?zero_pp_rank_)(?P<rank>\d+)_mp_rank_(?P<mp>\d+)(?P<more>_\d+)?_?optim_states\.pt"
)
_EXPERT = re.compile(r"layer_(?P<layer>\d+)_expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt")
_EXPERTS_OPTIMIZER = re.compile(r"expp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
_LAYER = re.compile(r"layer_(?P<index>\d+)-(?:model_(?P<part>\d+)-)?model_states\.pt")
_NOT_BUILT = {
    "mixture-of-experts layers in files without the layer's number": re.compile(r"expert_\d+_mp_rank_.*"),
    "pipeline parallelism over other axes": re.compile(r"layer_\d+-(?!(model_\d+-)?model_states\.pt).*"),
    "state offloaded to NVMe": re.compile(r"offloaded_tensors"),
}
_MAX_TAG_BYTES = 4096
_CHUNK = 1 << 20
_ALLOWING = threading.Lock()  # safe_globals() changes a list that all threads share


class PickledRecord:
    """The attributes of an object of a DeepSpeed class, as ``values``, without its methods."""

    __slots__ = ("values",)

    values: dict[str, Any]

    def __new__(cls) -> Self:
        record = super().__new__(cls)  # pickle calls no __init__
        record.values = {}
        return record

    def __setstate__(self, state: object) -> None:
        self.values = dict(state) if type(state) is dict else {}


class LossScaler(PickledRecord):
    """A loss scale: ``cur_scale``; of a dynamic one also ``cur_iter``, ``last_overflow_iter``, ``cur_hysteresis``."""


class FragmentAddress(PickledRecord):
    """Where a rank's flat partition holds a part of a parameter: ``start`` and ``numel``, in elements."""


class SubparamShape(PickledRecord):
    """Sizes of parameters that lie in one tensor: ``shape``, ``partition_dim``."""


class ZeroStage(int):
    """The ZeRO stage."""


# What torch.serialization.safe_globals takes: a class, and the name under which a file asks for it.
_ALLOWED_CLASSES: tuple[tuple[Any, str], ...] = (
    (LossScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (LossScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (FragmentAddress, "deepspeed.utils.tensor_fragment.fragment_address"),
    (SubparamShape, "deepspeed.checkpoint.universal_checkpoint.SubparamShape"),
    (ZeroStage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    # Of client states: what a script keeps of its command line, as Megatron's do. These hold values and run nothing.
    (Namespace, "argparse.Namespace"),
    (SimpleNamespace, "types.SimpleNamespace"),
    (PosixPath, "pathlib.PosixPath"),
)


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of one tag, of one tensor-parallel rank.

    Args:
        model: one file, or at stage 3 one for each rank.
        optimizer: one for each rank; none at stage 0, and where only the weights were kept.
        universal: the folder ``zero`` of a universal checkpoint, which has no optimizer files.
        experts: the weights of experts, by number of the MoE layer and of the expert.
        experts_optimizer: stage 0: the optimizers of the expert-parallel ranks.
        elsewhere: the experts of which another tensor-parallel rank has the only file, and has them whole.
        stages: of a pipeline, the files of each stage; ``model`` and ``optimizer`` are then the first one's.
        layers: of a pipeline, the files of weights, by the number of the layer.
    """

    folder: Path
    model: tuple[Path, ...]
    is_stage_3: bool
    optimizer: dict[int, Path]
    universal: Path | None = None
    experts: dict[tuple[int, int], Path] = field(default_factory=dict)
    experts_optimizer: dict[int, Path] = field(default_factory=dict)
    elsewhere: frozenset[tuple[int, int]] = frozenset()
    stages: tuple[CheckpointFiles, ...] = ()
    layers: Mapping[int, Path] = field(default_factory=dict)

    def optimizer_of(self, size: int) -> tuple[list[Path], list[str]]:
        """The optimizer files of ranks 0 to ``size - 1``, and a note on files of other ranks.

        Raises: CheckpointError: some are missing.
        """
        number = size - sum(rank < size for rank in self.optimizer)
        if number > 0:
            example = next(iter(self.optimizer.values())).name
            missing = islice((rank for rank in range(size) if rank not in self.optimizer), 8)
            names = [re.sub(r"pp_rank_\d+", f"pp_rank_{rank}", example, count=1) for rank in missing]
            what = f"the optimizer files of {number} of {size} ranks are missing: {', '.join(names)}"
            raise damaged_copy(f"{what}{' and others' if number > 8 else ''}.", str(self.folder))
        left = sorted(rank for rank in self.optimizer if rank >= size)
        notes = [f"{len(left)} optimizer files of ranks beyond {size - 1} are of another save and were left out."]
        return [self.optimizer[rank] for rank in range(size)], notes if left else []


def find_files(folder: str | os.PathLike[str], tag: str | None) -> list[CheckpointFiles]:
    """The files of a checkpoint: of ``tag``, of the tag that ``latest`` names, or in the folder itself.

    Returns: those of each tensor-parallel rank; of a universal checkpoint, where tensors are whole, those of the first.

    Raises:
        CheckpointError: there is none, or its files contradict each other.
        NotBuiltError: a kind of checkpoint that cannot be read yet.
    """
    storage = open_storage(folder)
    if not isinstance(storage, LocalStorage):
        raise CheckpointError(
            f"{storage.url} is no local folder, and DeepSpeed's files are read from one only.",
            do="copy it to a local disk, or mount it.",
            code="checkpoint-storage",
        )
    place = _tag_folder(storage.root, tag)
    names = sorted(entry.name for entry in place.iterdir())
    for what, pattern in _NOT_BUILT.items():
        unread = [name for name in names if pattern.fullmatch(name)]
        if unread:
            raise not_built(what, f"{place}/{unread[0]}")
    universal = place / UNIVERSAL if UNIVERSAL in names else None
    parts = {int(match["mp"]) for match in map(_MODEL.fullmatch, names) if match is not None}
    if not parts:
        what = "no *_model_states.pt lies here, so this is no checkpoint of DeepSpeed's."
        raise _missing(what, place, "name the folder that was given to save_checkpoint(), or the tag's folder in it.")
    if universal is not None:
        return [_files_of(place, names, min(parts), universal)]
    parts |= {int(match["mp"]) for match in map(_OPTIMIZER.fullmatch, names) if match is not None}
    absent = next((part for part in range(max(parts) + 1) if part not in parts), None)
    if absent is not None:
        raise damaged_copy(f"no file of tensor-parallel rank {absent} (mp_rank_{absent:02d}) is here.", str(place))
    of_parts = [_files_of(place, names, part, None) for part in sorted(parts)]
    layers = [match for match in map(_LAYER.fullmatch, names) if match is not None]
    return _of_stages(place, of_parts, layers) if layers else _with_whole_experts(place, of_parts)


def _with_whole_experts(place: Path, parts: list[CheckpointFiles]) -> list[CheckpointFiles]:
    """Of each expert, one tensor-parallel rank's files have all, or each rank's have a part.

    Raises: CheckpointError: neither, or the optimizers of some ranks alone are here.
    """
    everywhere = {expert for part in parts for expert in part.experts}
    if not everywhere:
        return parts
    ranks_of = {expert: [rank for rank, part in enumerate(parts) if expert in part.experts] for expert in everywhere}
    numbers = {len(ranks) for ranks in ranks_of.values()}
    if len(numbers) > 1 or not numbers <= {1, len(parts)}:
        layer, number = min(everywhere, key=lambda expert: (len(ranks_of[expert]), expert))
        what = f"expert {number} of layer {layer} has files of tensor-parallel ranks {ranks_of[layer, number]}"
        raise damaged_copy(f"{what}, and other experts of {max(numbers)} ranks.", str(place))
    without = [rank for rank, part in enumerate(parts) if not part.experts_optimizer]
    if 0 < len(without) < len(parts):
        raise damaged_copy(f"no expp_rank_*_mp_rank_{without[0]:02d}_optim_states.pt is here.", str(place))
    if numbers == {len(parts)}:
        return parts
    return [replace(part, elsewhere=frozenset(everywhere - part.experts.keys())) for part in parts]


def _of_stages(place: Path, parts: list[CheckpointFiles], layers: list[re.Match[str]]) -> list[CheckpointFiles]:
    """Of a pipeline: the files of each tensor-parallel rank. Ranks are counted by stage, then by tensor parallelism."""
    by_part: dict[int, dict[int, Path]] = {}
    for match in layers:
        by_part.setdefault(int(match["part"] or 0), {})[int(match["index"])] = place / match.string
    size = len(by_part)
    if sorted(by_part) != list(range(size)) or len(parts) % size or parts[0].is_stage_3:
        what = f"layer files of tensor-parallel ranks {sorted(by_part)} lie with model files of {len(parts)} ranks"
        raise damaged_copy(f"{what} (stages x tensor-parallel ranks).", str(place))
    if any(part.experts for part in parts):
        raise not_built("mixture-of-experts layers in pipeline stages", str(place))
    absent = next((i for files in by_part.values() for i in by_part[0].keys() ^ files.keys()), None)
    if absent is not None:
        raise damaged_copy(f"layer {absent} has files of some tensor-parallel ranks only.", str(place))
    return [replace(parts[i], stages=tuple(parts[i::size]), layers=by_part[i]) for i in range(size)]


def _files_of(place: Path, names: list[str], part: int, universal: Path | None) -> CheckpointFiles:
    """The files of one tensor-parallel rank. Raises: CheckpointError."""
    model = _by_rank(place, names, _MODEL, part)
    optimizer = _by_rank(place, names, _OPTIMIZER, part)
    if not model:
        what = f"the model file of tensor-parallel rank {part} is missing."
        raise not_saved(what, place, has_experts=any(map(_EXPERT.fullmatch, names)))
    if None in model:
        if len(model) > 1:
            what = f"{model[None].name} (stages 0 to 2) lies here with {len(model) - 1} model files of ranks (stage 3)."
            raise _of_two_saves(what, place)
        experts = {(int(m["layer"]), int(m["expert"])): place / m[0] for m in _matches(names, _EXPERT, part)}
        optimizers = {int(m["rank"]): place / m[0] for m in _matches(names, _EXPERTS_OPTIMIZER, part)}
        if optimizers and optimizer:
            what = f"{optimizers[min(optimizers)].name} (stage 0) lies here with optimizer files of stage 1 or 2."
            raise _of_two_saves(what, place)
        return CheckpointFiles(place, (model[None],), False, _ranks(optimizer), universal, experts, optimizers)
    ranks = _ranks(model)
    number = max(ranks) + 1 - len(ranks)
    if number:
        missing = islice((rank for rank in range(max(ranks)) if rank not in ranks), 8)
        names = [f"zero_pp_rank_{rank}_mp_rank_{part:02d}_model_states.pt" for rank in missing]
        what = f"{number} model files are missing: {', '.join(names)}{' and others' if number > 8 else ''}."
        raise damaged_copy(what, str(place))
    return CheckpointFiles(place, tuple(ranks[rank] for rank in sorted(ranks)), True, _ranks(optimizer), universal)


class Turns:
    """Which files this rank reads once to compare the checksums in them: all of it, or every ``size``-th.

    Ranks that open the same files in the same order compare each file's once.
    """

    def __init__(self, *, verify: bool, rank: int = 0, size: int = 1) -> None:
        self._verify, self._rank, self._size = verify, rank, size
        self._count = 0

    def take(self) -> bool:
        """True if the next file is this rank's."""
        self._count += 1
        return self._verify and (self._count - 1) % self._size == self._rank


def open_file(path: Path, *, verify: bool) -> dict[str, Any]:
    """What a file holds, its tensors mapped from it.

    Args:
        verify: read the file once and compare the checksums in it.

    Raises: CheckpointError: it asks for a class that is not one of ours, or it is damaged.
    """
    state = open_value(path, verify=verify)
    if not isinstance(state, dict):
        raise damaged_copy(f"a dict was expected, not a {type(state).__name__}.", str(path))
    return state


def open_value(path: Path, *, verify: bool) -> Any:
    """As ``open_file``, of a file that need not hold a dict."""
    with _ALLOWING, torch.serialization.safe_globals(list(_ALLOWED_CLASSES)):
        state = load(path)
    if verify:
        _check_sums(path)
    return state


def not_built(what: str, where: str) -> NotBuiltError:
    return NotBuiltError(
        f"a DeepSpeed checkpoint with {what} cannot be read yet.",
        where=where,
        do="in DeepSpeed, load it and save it without, or convert it with zero_to_fp32.py, which gives the weights.",
        code="not-built",
    )


def _missing(what: str, where: Path, do: str) -> CheckpointError:
    return CheckpointError(what, where=str(where), do=do, code="checkpoint-missing")


def not_saved(what: str, where: Path, *, has_experts: bool) -> CheckpointError:
    """Files of a tensor-parallel rank are missing."""
    do = "if two saves went to one tag, remove the older files; otherwise copy the missing ones."
    if has_experts:
        do += (
            " DeepSpeed itself leaves them out where experts are not split over tensor-parallel ranks and their ep_size"
            " is below the number of these ranks: train with a larger ep_size, or enable_expert_tensor_parallelism."
        )
    return CheckpointError(what, where=str(where), do=do, code="checkpoint-damaged")


def _of_two_saves(what: str, where: Path) -> CheckpointError:
    do = "two saves went to one tag: remove the files of the older one."
    return CheckpointError(what, where=str(where), do=do, code="checkpoint-damaged")


def _tag_folder(root: Path, tag: str | None) -> Path:
    for hint in (root / "latest", root / "latest_universal"):
        if tag is None and hint.is_file():
            with hint.open("rb") as file:
                tag = file.read(_MAX_TAG_BYTES).decode(errors="replace").strip()
    if tag is None:
        if not root.is_dir():
            raise _missing("there is no such folder.", root, "name the folder that was given to save_checkpoint().")
        if any(_MODEL.fullmatch(entry.name) for entry in root.iterdir()):
            return root
        raise _missing(f"there is no file 'latest', and no tag was named. {_tags(root)}", root, "name the tag.")
    if not is_inside(tag):
        raise unsafe(f"{tag[:200]!r} is not the name of a folder in it.", str(root))
    if not root.joinpath(tag).is_dir():
        raise _missing(f"tag {tag!r} is not there. {_tags(root)}", root, "name another tag.")
    return root / tag


def is_inside(name: str) -> bool:
    """True if it names something inside a folder, and nothing outside of it."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _tags(root: Path) -> str:
    tags = sorted(path.parent.name for path in root.glob("*/*mp_rank_00_model_states.pt")) if root.is_dir() else []
    return f"Tags in it: {', '.join(list(dict.fromkeys(tags))[:8])}." if tags else "No tag is in it."


def _by_rank(place: Path, names: Iterable[str], pattern: re.Pattern[str], part: int) -> dict[int | None, Path]:
    """The files of one tensor-parallel rank by data-parallel rank."""
    paths: dict[int | None, Path] = {}
    for match in _matches(names, pattern, part):
        name = match[0]
        if match["more"]:
            raise not_built("pipeline parallelism over other axes", str(place / name))
        rank = None if match["rank"] is None else int(match["rank"])
        if rank in paths:
            raise _of_two_saves(f"{paths[rank].name} and {name} are both of rank {rank}.", place)
        paths[rank] = place / name
    return paths


def _matches(names: Iterable[str], pattern: re.Pattern[str], part: int) -> list[re.Match[str]]:
    """The files of one tensor-parallel rank."""
    return [match for match in map(pattern.fullmatch, names) if match is not None and int(match["mp"]) == part]


def _ranks(paths: dict[int | None, Path]) -> dict[int, Path]:
    return {rank: path for rank, path in paths.items() if rank is not None}


def _check_sums(path: Path) -> None:
    """Compare each part of a zip file with its CRC-32. Memory: 1 MiB."""
    if not zipfile.is_zipfile(path):
        return  # the format before PyTorch 1.6 has no checksums
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.CRC == 0:  # torch.save was called without checksums
                continue
            try:
                with archive.open(entry) as part:
                    while part.read(_CHUNK):
                        pass
            except (zipfile.BadZipFile, OSError, EOFError) as error:
                raise damaged_copy(f"{path.name} is damaged: {str(error).rstrip('.')}.", str(path)) from error
