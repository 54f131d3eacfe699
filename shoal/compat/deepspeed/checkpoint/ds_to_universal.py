"""``deepspeed.checkpoint.ds_to_universal``: a checkpoint that every layout loads.

    python -m deepspeed.checkpoint.ds_to_universal --input_folder run/global_step10 \\
        --output_folder run/global_step10_universal

The output is a checkpoint of Shoal's: a checkpoint of Shoal's loads in every layout unchanged, so its files get a
second name; one of DeepSpeed's is converted. ``latest_universal`` names it, and ``checkpoint.load_universal`` loads it.
"""

from __future__ import annotations

import argparse
from typing import Any

from shoal.compat.checkpoints.universal import make_universal
from shoal.engine.log import logger, make_audible


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Make a checkpoint that every layout loads.")
    parser.add_argument("--input_folder", required=True, help="a checkpoint: the tag's folder")
    parser.add_argument("--output_folder", required=True, help="the folder to make; its name is the tag")
    parser.add_argument("--num_extract_workers", type=int, default=4, help="no effect: one tensor at a time")
    parser.add_argument("--num_merge_workers", type=int, default=2, help="no effect: one tensor at a time")
    parser.add_argument("--keep_temp_folder", action="store_true", help="no effect: there is none")
    parser.add_argument("--no_strict", dest="strict", action="store_false", help="no effect: it is always checked")
    parser.add_argument("--inject_missing_state", action="store_true", help="no effect: none is needed")
    return parser.parse_args()


def main(args: Any) -> None:
    """Make the output folder.

    Args:
        args: ``input_folder``, ``output_folder``; DeepSpeed's other options have no effect.

    Raises: CheckpointError: the input is no checkpoint, or is damaged; or the output is there and is none.
    """
    make_audible(None)
    unused = {name: getattr(args, name, False) for name in ("keep_temp_folder", "inject_missing_state")}
    unused["no_strict"] = not getattr(args, "strict", True)
    for name in (name for name, is_set in unused.items() if is_set):
        logger.warning("--%s has no effect: a tensor is read, checked and written at a time.", name)
    made = make_universal(args.input_folder, args.output_folder)
    for note in made.notes:
        logger.warning("%s", note)
    if made.format == "shoal":
        logger.info(
            "%s loads in every layout as is. %s is the same checkpoint: %d files have a second name, %d are copies.",
            args.input_folder,
            args.output_folder,
            made.linked,
            made.copied,
        )
    else:
        logger.info(
            "%s, which DeepSpeed saved, is a checkpoint of Shoal's in %s.", args.input_folder, args.output_folder
        )


if __name__ == "__main__":
    main(parse_arguments())
