"""What a step waits for its data: blocks of steps that load, and blocks on one batch in memory, in turn in one run.

    python -m benchmarks.data_wait --tokens 500000000

Loads by ``Loader`` as ``shoal train`` does: from the text of its quickstart, and from a file of ``--tokens`` random
tokens of 2 bytes (1 GB), which is written, flushed and dropped from the system's cache. Every sample is read once, at
a random place, so each is cold. ``wait_percent`` is the median over blocks of the time in which the loop asked for
batches over the time of the block, on the host; the goal is below 0.5. ``ratio`` is the median over pairs of the time
of a block that loads over the time of one that does not. ``read_bytes`` is what the process read from the disk during
the steps, by /proc/self/io (None: unknown); 0 with a large file means that it was in the cache all the same. Only a
machine that does nothing else tells such times.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import shoal
from shoal.data import (
    ByteTokenizer,
    Loader,
    RepeatingLoader,
    TokenFile,
    TokenFileWriter,
    TokenStream,
    default_texts,
    split,
    tokenize,
)
from shoal.device import Device
from shoal.models import GPT, named_config

VOCAB_SIZE = 1_000  # tokens of 2 bytes, and a head that does not make the step longer than that of the text
_CHUNK = 1 << 22  # tokens that are written together
_DOCUMENT = 1 << 10  # tokens


def write_cold(path: Path, num_tokens: int) -> None:
    """Write a file of random tokens, the same in each chunk, and drop its pages from the system's cache."""
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, _CHUNK, dtype=np.uint16)
    with TokenFileWriter(path, vocab_size=VOCAB_SIZE, overwrite=True) as writer:
        for begin in range(0, num_tokens, _CHUNK):
            size = min(_CHUNK, num_tokens - begin)
            lengths = [min(_DOCUMENT, size - at) for at in range(0, size, _DOCUMENT)]
            writer.write(tokens[:size], lengths)
    drop_cached(path)


def drop_cached(path: Path) -> None:
    """Drop a folder's files from the system's cache; no process may have them mapped."""
    for file in path.iterdir():
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def stream_of(source: str, path: Path, length: int, num_tokens: int) -> tuple[TokenStream, int]:
    """What ``shoal train`` reads of the text of its quickstart, or of a cold file of tokens; and the vocabulary."""
    if source == "text":
        return split(tokenize(default_texts(), ByteTokenizer()), 0.05, length)[0], ByteTokenizer.vocab_size
    write_cold(path, num_tokens)
    return split([TokenFile(path)], 0.05, length)[0], VOCAB_SIZE


def bytes_read() -> int | None:
    """From the disk, by this process."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes")), None)


class _Trainer:
    def __init__(self, model: str, vocab_size: int, length: int, micro: int) -> None:
        torch.manual_seed(0)
        network = GPT(named_config(model, vocab_size=vocab_size, sequence_length=length))
        config = {"train_micro_batch_size_per_gpu": micro, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
        self.engine = shoal.initialize(model=network, config=config)[0]
        self.device = Device(self.engine.device)

    def block(self, batches: Iterator[Any], steps: int) -> tuple[float, float]:
        """Run so many steps. Returns: seconds in all, and seconds in which the loop asked for batches."""
        waited = 0.0
        self.device.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            asked = time.perf_counter()
            tokens, targets = next(batches)
            waited += time.perf_counter() - asked
            device = self.engine.device
            self.engine.backward(self.engine(tokens.to(device), targets.to(device)))
            self.engine.step()
        self.device.synchronize()
        return time.perf_counter() - began, waited


def measure(
    folder: Path,
    source: str,
    *,
    model: str = "tiny",
    length: int = 256,
    micro: int = 8,
    tokens: int = 500_000_000,
    workers: int = 0,
    blocks: int = 10,
    steps: int = 10,
) -> dict[str, Any]:
    """Run pairs of blocks, each second one in the opposite order.

    Args:
        folder: on the disk that is measured; the file of tokens is removed at the end.
        source: ``text`` or ``tokens``.

    Returns: the percentage of a step that waits for data, and the ratio of times with and without loading.
    """
    path = folder / "tokens"
    try:
        stream, vocab_size = stream_of(source, path, length, tokens)
        trainer = _Trainer(model, vocab_size, length, micro)
        engine = trainer.engine
        loader = Loader(
            stream, micro, num_workers=workers, num_micro=engine.gradient_accumulation_steps, device=engine.device
        )
        loaded = iter(RepeatingLoader(loader))
        constant = next(loaded)
        in_memory = iter(lambda: constant, None)
        for batches in (in_memory, loaded):
            trainer.block(batches, 2)
        before, pairs = bytes_read(), []
        for number in range(blocks):
            order = (in_memory, loaded) if number % 2 else (loaded, in_memory)
            seconds = {id(batches): trainer.block(batches, steps) for batches in order}
            pairs.append((*seconds[id(loaded)], seconds[id(in_memory)][0]))
        after = bytes_read()
        engine.destroy()
    finally:
        shutil.rmtree(path, ignore_errors=True)
    waits = sorted(100 * waited / total for total, waited, _ in pairs)
    return {
        "source": source,
        "wait_percent": median(waits),
        "greatest_wait_percent": waits[-1],
        "step_ms": 1e3 * median(total for total, _, _ in pairs) / steps,
        "ratio": median(total / without for total, _, without in pairs),
        "read_bytes": None if before is None or after is None else after - before,
        "pairs": len(pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/data_wait"), help="on the disk that is measured")
    parser.add_argument("--sources", nargs="+", choices=("text", "tokens"), default=["text", "tokens"])
    parser.add_argument("--model", default="tiny", help="a size of shoal train")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--micro", type=int, default=8, help="sequences of a step")
    parser.add_argument("--tokens", type=int, default=500_000_000, help="of the file, of 2 bytes each")
    parser.add_argument("--workers", type=int, default=0, help="processes that read ahead; shoal train has none")
    parser.add_argument("--blocks", type=int, default=10, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=10, help="of a block")
    arguments = vars(parser.parse_args())
    folder = arguments.pop("folder")
    folder.mkdir(parents=True, exist_ok=True)
    for source in arguments.pop("sources"):
        print(json.dumps({**arguments, **measure(folder, source, **arguments)}))


if __name__ == "__main__":
    main()
