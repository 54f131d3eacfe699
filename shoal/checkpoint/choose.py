"""Which checkpoint of a folder is loaded.

    asked for                     chosen
    a tag                         that one, of Shoal's or DeepSpeed's
    none, ``load_universal``      what ``latest_universal`` names, if there is that file
    none                          what ``latest`` names, if DeepSpeed saved it; else the newest whole one of Shoal's

Only rank 0 looks.
"""

from __future__ import annotations

import logging

from shoal.checkpoint import catalogue
from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.load import agree
from shoal.checkpoint.storage import Storage
from shoal.comm.protocol import Communicator
from shoal.errors import CheckpointError

logger = logging.getLogger("shoal")


def candidates(comm: Communicator, storage: Storage, tag: str | None, *, is_universal: bool = False) -> list[str]:
    """The folders that may be loaded, the best first. Raises: CheckpointError: there is none.

    Args:
        is_universal: without a tag, the one that ``latest_universal`` names, if there is that file.

    Communicates: rank 0's answer.
    """
    problem: Exception | None = None
    folders: list[str] = []
    if comm.rank == 0:
        try:
            named = _universal(storage) if is_universal and tag is None else None
            wanted = tag if tag is not None else named
            folders = [catalogue.find_tag(storage, str(wanted))] if wanted is not None else _resumable(storage)
        except Exception as error:
            problem = error
    return list(agree(comm, problem, folders, "checkpoint: choice")[0])


def _universal(storage: Storage) -> str | None:
    """What ``latest_universal`` names; it stays while training goes on and saves, so a later save is told."""
    named, latest = catalogue.hint(storage, catalogue.LATEST_UNIVERSAL), catalogue.hint(storage)
    if named is None:
        logger.info(
            "checkpoint.load_universal: there is no %s, and none is needed: every checkpoint of Shoal's loads in every"
            " layout.",
            catalogue.LATEST_UNIVERSAL,
        )
        return None
    if not catalogue.is_name(named):
        raise CheckpointError(
            f"{catalogue.LATEST_UNIVERSAL} holds {named[:200]!r}, which is not the name of a folder in it.",
            where=storage.url,
            do="name the tag.",
            code="checkpoint-unsafe",
        )
    if latest is not None and latest != named and f"{latest}_universal" != named:
        logger.warning(
            "checkpoint.load_universal: %s names %r, so that is loaded, and not %r, which was saved last. Take the key"
            " out of the config to load what was saved last.",
            catalogue.LATEST_UNIVERSAL,
            named,
            latest,
        )
    return named


def _resumable(storage: Storage) -> list[str]:
    found = catalogue.look(storage)
    for entry in found:
        if entry.problem is not None:
            logger.warning("%s is passed over: %s", entry.folder, entry.problem.what)
    whole = [entry for entry in found if entry.manifest is not None]
    meant = [entry for entry in whole if entry.manifest is not None and entry.manifest.is_for_resuming] or whole
    deepspeeds = catalogue.deepspeeds_tag(storage)
    if deepspeeds is not None:
        if meant:
            logger.warning(
                "%s names %r, which DeepSpeed saved: it is loaded. Pass tag=%r to load the newest of Shoal's.",
                catalogue.LATEST,
                deepspeeds,
                meant[0].folder,
            )
        return [deepspeeds]
    if not meant:
        damaged = [entry.folder for entry in found]
        raise CheckpointError(
            f"no whole checkpoint in {storage.url}"
            + (f" (damaged or unfinished: {', '.join(damaged[:5])})." if damaged else "."),
            do="load from the folder around it, with its name as the tag."
            if storage.exists(manifests.NAME)
            else "see whether the folder is the one that was saved to; `shoal convert` reads other formats.",
            code="checkpoint-missing",
        )
    hinted = catalogue.hint(storage)
    names = {entry.folder for entry in whole} | {entry.manifest.tag for entry in whole if entry.manifest is not None}
    if hinted in names - {meant[0].folder, meant[0].manifest and meant[0].manifest.tag}:
        logger.warning(
            "%s names %r, but %s is newer and whole: it is loaded. Pass tag=%r to load the other.",
            catalogue.LATEST,
            hinted,
            meant[0].folder,
            hinted,
        )
    return [entry.folder for entry in meant]
