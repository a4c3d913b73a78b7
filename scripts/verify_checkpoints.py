"""Read every byte of a run's checkpoints and list the damaged ones; `latest` resumes from the newest undamaged one.

    python scripts/verify_checkpoints.py --output_dir outputs/mine

The exit status is 1 if a checkpoint is damaged, so a nightly job can watch a disk.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from tqdm.auto import tqdm

from mm_utils.arguments import arg, parse_args
from mm_utils.checkpointing.files import checkpoint_folders, size_of, verify
from mm_utils.distributed import RunError
from mm_utils.run.start import run_script, set_up_logging

logger = logging.getLogger(__name__)


@dataclass
class VerifyArguments:
    """The run to check."""

    output_dir: str = arg("outputs/pretrain-1", "The folder of a run.")


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the script and return the number of checkpoints; raise RunError if one is damaged."""
    # 1. Arguments.
    args = parse_args(VerifyArguments, argv=argv, doc=__doc__)[VerifyArguments]
    set_up_logging()
    folders = checkpoint_folders(Path(args.output_dir))
    if not folders:
        raise ValueError(
            f"--output_dir is {args.output_dir}; it holds no checkpoint-N folder. Give the folder of a run."
        )

    # 2. Read them all.
    wrong = {folder: verify(folder) for folder in tqdm(folders, desc="Verifying", unit="checkpoint", leave=False)}

    # 3. Report.
    lines = [
        f"{folder.name:<24}{size_of(folder) / 2**20:>10,.1f} MiB   {'; '.join(found) or 'undamaged'}"
        for folder, found in wrong.items()
    ]
    logger.info("\n%s", "\n".join(lines))
    damaged = sum(map(bool, wrong.values()))
    if damaged:
        raise RunError(
            f"{damaged} of {len(folders)} checkpoints in {args.output_dir} are damaged. Restore them from a copy, or delete "
            "them; --resume_from_checkpoint latest passes over them."
        )
    return {"checkpoints": float(len(folders))}


if __name__ == "__main__":
    run_script(main)
