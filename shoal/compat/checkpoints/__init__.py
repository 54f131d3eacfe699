"""DeepSpeed's checkpoints: read as a ``Source``, and written.

    reads       deepspeed       all kinds: ``DeepSpeedSource``
                files           which files a checkpoint consists of
                model_file      weights, counters and names
                state, unnamed  the optimizer's state of stages 1 to 3, and of stage 0, which has no names
                pipeline, tensor_parallel, experts, autoep      what ranks of other axes have
                universal       the format of ds_to_universal
    writes      writing, universal

Here is what ``shoal.checkpoint`` has to know of them.
"""

from __future__ import annotations

import re

from shoal.checkpoint.foreign import ForeignFormat

UNIVERSAL = "zero"  # the folder of weights and state in a universal checkpoint

DEEPSPEED = ForeignFormat(
    name="deepspeed",
    program="DeepSpeed",
    # A save under DeepSpeed's name writes some of these next to Shoal's files; alone they are a checkpoint of its own.
    file=re.compile(
        r"((bf16_|fp16_)?zero_pp_rank_\d+_)?mp_rank_\d{2,}_(model|optim)_states\.pt"
        r"|layer_\d+-(model_\d+-)?model_states\.pt|layer_\d+_expert_\d+_mp_rank_\d{2,}_model_states\.pt"
        r"|expp_rank_\d+_mp_rank_\d{2,}_optim_states\.pt"
    ),
    folders=(UNIVERSAL,),
    opener="shoal.compat.checkpoints.deepspeed:DeepSpeedSource",
)
