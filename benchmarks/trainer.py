"""How long a Trainer run takes from its first process to its last: Shoal under DeepSpeed's name, and DeepSpeed.

    python -m benchmarks.trainer --python PYTHON --rounds 5

PYTHON has transformers, accelerate, deepspeed 0.19.8 and what Shoal needs; the same script runs in it twice a round,
once as it is and once by ``-m shoal.compat.deepspeed``, on two ranks over Gloo: a GPT-2 shape of 29.6 M parameters.
DeepSpeed's C++ operators are compiled by a run that is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LENT = ["-m", "shoal.compat.deepspeed"]


def work(stage: int, steps: int, batch: int, length: int, precision: str) -> None:
    """One rank: a Trainer run as a user writes it; rank 0 prints what it logged."""
    import torch
    from accelerate import PartialState
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    config = {
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
        },
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=batch, max_steps=steps, learning_rate=3e-4, warmup_steps=2,
            logging_steps=5, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, seed=17,
            bf16=precision == "bf16", deepspeed=config, accelerator_config={"use_configured_state": True},
            train_sampling_strategy="sequential", dataloader_pin_memory=False,
        )  # fmt: skip
        torch.manual_seed(17)
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=8192, n_positions=256, n_embd=512, n_layer=8, n_head=8, resid_pdrop=0.0, embd_pdrop=0.0,
                attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
            )
        )  # fmt: skip
        generator = torch.Generator().manual_seed(17)
        rows = [torch.randint(8192, (length,), generator=generator) for _ in range(2 * batch * steps)]
        trainer = Trainer(model=model, args=args, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
        trainer.train()
        if trainer.is_world_process_zero():
            logs = trainer.state.log_history
            print("RESULT " + json.dumps({
                "losses": [log["loss"] for log in logs if "loss" in log],
                "training_seconds": logs[-1]["train_runtime"],
            }), flush=True)  # fmt: skip
    torch.distributed.destroy_process_group()


def timed(python: str, *, is_lent: bool, arguments: list[str]) -> dict[str, Any]:
    """Start two ranks and wait for both. Returns: RESULT, ``seconds`` and ``cpu_seconds``, with start-up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"rank{rank}") for rank in range(2)]
        begin = time.perf_counter()
        processes = []
        for rank, log in enumerate(logs):
            with log.open("w") as out:
                processes.append(
                    subprocess.Popen(
                        [python, *(LENT if is_lent else []), str(Path(__file__).resolve()), "--worker", *arguments],
                        env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=folder, stdout=out,
                        stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip
        ended = [os.wait4(process.pid, 0) for process in processes]
        seconds = time.perf_counter() - begin
        codes = [os.waitstatus_to_exitcode(status) for _, status, _ in ended]
        for process, code in zip(processes, codes, strict=True):
            process.returncode = code
        cpu = sum(usage.ru_utime + usage.ru_stime for _, _, usage in ended)
        said = logs[0].read_text()
    if any(codes):
        raise SystemExit(f"exit codes {codes}\n{said[-4000:]}")
    line = next(line for line in said.splitlines() if line.startswith("RESULT "))
    return {**json.loads(line.removeprefix("RESULT ")), "seconds": seconds, "cpu_seconds": cpu}


def _summary(pairs: list[dict[str, Any]]) -> str:
    def middle(who: str, what: str) -> float:
        return statistics.median(pair[who][what] for pair in pairs)

    def ratio(what: str) -> float:
        return statistics.median(pair["shoal"][what] / pair["deepspeed"][what] for pair in pairs)

    each = [
        f"{who} {middle(who, 'seconds'):.1f} s ({middle(who, 'training_seconds'):.1f} s in train(),"
        f" {middle(who, 'cpu_seconds'):.1f} s of processor)"
        for who in ("shoal", "deepspeed")
    ]
    return (
        f"{', '.join(each)}; median ratio {ratio('seconds'):.2f} (train() {ratio('training_seconds'):.2f}, processor"
        f" {ratio('cpu_seconds'):.2f}); load {statistics.median(pair['load'] for pair in pairs):.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="a Python with the clients and deepspeed 0.19.8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a rank's micro-batch")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.stages[0], options.steps, options.batch, options.length, options.precision)
        return
    rows = []
    for stage in options.stages:
        arguments = [
            "--stages", str(stage), "--steps", str(options.steps), "--batch", str(options.batch), "--length",
            str(options.length), "--precision", options.precision,
        ]  # fmt: skip
        timed(options.python, is_lent=False, arguments=arguments)
        pairs = []
        for number in range(options.rounds):
            order = [True, False] if number % 2 else [False, True]
            got = {lent: timed(options.python, is_lent=lent, arguments=arguments) for lent in order}
            pairs.append({"shoal": got[True], "deepspeed": got[False], "load": os.getloadavg()[0]})
            print(
                f"stage {stage}: shoal {got[True]['seconds']:.1f} s, deepspeed {got[False]['seconds']:.1f} s",
                flush=True,
            )
        apart = max(abs(a - b) for a, b in zip(got[True]["losses"], got[False]["losses"], strict=True))
        rows.append({"stage": stage, "pairs": pairs, "losses_apart": apart})
        print(f"stage {stage}, {options.precision}: {_summary(pairs)}; losses apart {apart:.1e}", flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"options": {**vars(options), "out": None}, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
