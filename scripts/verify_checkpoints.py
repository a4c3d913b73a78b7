"""Read every byte of a run's checkpoints and of its finished model, and list what is damaged.

    python scripts/verify_checkpoints.py --output_dir outputs/mine

`latest` resumes from the newest undamaged checkpoint. The exit status is 1 if anything is damaged, so a nightly job can watch a disk.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from mm_utils.arguments import arg, parse_args, parse_first


@dataclass
class VerifyArguments:
    """The run to check."""

    output_dir: str = arg("outputs/pretrain-1", "The folder of a run.")


FLAGS = (VerifyArguments,)

if __name__ == "__main__":
    parse_first(*FLAGS, doc=__doc__)

from tqdm.auto import tqdm

from mm_utils.checkpointing.files import checkpoint_folders, verify
from mm_utils.distributed import RunError
from mm_utils.files import SUMS_FILE
from mm_utils.run.script import run_script, set_up_logging

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the script and return the number of checkpoints; raise RunError if one or the model is damaged."""
    # 1. Arguments.
    args = parse_args(*FLAGS, argv=argv, doc=__doc__)[VerifyArguments]
    set_up_logging()
    output_dir = Path(args.output_dir)
    folders = checkpoint_folders(output_dir)
    is_finished = (output_dir / SUMS_FILE).is_file()
    if not folders and not is_finished:
        raise ValueError(
            f"--output_dir is {output_dir}; it holds no checkpoint-N folder and no model with {SUMS_FILE}. Give the folder of "
            "a run."
        )

    # 2. Read them all, and the finished model.
    wrong = {folder.name: verify(folder) for folder in tqdm(folders, desc="Verifying", unit="checkpoint", leave=False)}
    if is_finished:
        wrong["model"] = verify(output_dir)

    # 3. Report.
    logger.info("\n%s", "\n".join(f"{name:<24}{'; '.join(lines) or 'undamaged'}" for name, lines in wrong.items()))
    if not is_finished and (output_dir / "model.safetensors").is_file():
        logger.warning("%s: the model was not checked, for it has no %s", output_dir, SUMS_FILE)
    if damaged := [name for name, lines in wrong.items() if lines]:
        raise RunError(
            f"Damaged in {output_dir}: {', '.join(damaged)}. Restore from a copy, or delete them; "
            "--resume_from_checkpoint latest passes over damaged checkpoints."
        )
    return {"checkpoints": float(len(folders))}


if __name__ == "__main__":
    run_script(main)
