"""A script that knows Accelerate only: how it trains is said by ``accelerate launch``, in flags or in a file.

With the argument "dummies" the optimizer and the schedule are the configuration's.
"""

from __future__ import annotations

import json
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DummyOptim, DummyScheduler, InitProcessGroupKwargs, set_seed
from torch.utils.data import DataLoader

from tests.clients.scripts.common import Sequences, gpt2, tensors_norm


def main(name: str, *, uses_dummies: bool) -> None:
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    set_seed(17)
    model = gpt2()
    make, schedule_of = (torch.optim.AdamW, None) if not uses_dummies else (DummyOptim, DummyScheduler)
    optimizer = make(model.parameters(), lr=3e-3, weight_decay=0.01)
    if schedule_of is None:
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=24)
    else:
        schedule = schedule_of(optimizer, total_num_steps=24, warmup_num_steps=2)
    batches = DataLoader(Sequences(48), batch_size=2)
    model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, batches, schedule)
    losses, rates = [], []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            losses.append(float(accelerator.gather(loss.detach().reshape(1)).mean()))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        rates.append(schedule.get_last_lr()[0])
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        result = {
            "case": name,
            "curves": {"loss": losses, "lr": rates},
            "weights": {"norm": round(tensors_norm({n: t for n, t in state.items() if n != "lm_head.weight"}), 4)},
            "facts": {
                "stage": accelerator.state.deepspeed_plugin.zero_stage,
                "processes": accelerator.num_processes,
                "batch": accelerator.deepspeed_config["train_batch_size"],
                "dtype": str(next(iter(state.values())).dtype),
            },
        }
        print("RESULT " + json.dumps(result), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], uses_dummies="dummies" in sys.argv[2:])
