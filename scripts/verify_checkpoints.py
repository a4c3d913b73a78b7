"""Read every byte of a run's checkpoints and say which are whole; the newest of those is what `latest` resumes from.

    python scripts/verify_checkpoints.py --output_dir outputs/mine

The exit status is 1 if one is damaged, so a nightly job can watch a disk.
"""

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

from tqdm.auto import tqdm

from mm_utils.arguments import arg, parse_args
from mm_utils.checkpoints import checkpoint_folders, size_of, verify
from mm_utils.run import run_script, set_up_logging

logger = logging.getLogger(__name__)


@dataclass
class VerifyArguments:
    """Whose checkpoints."""

    output_dir: str = arg("outputs/pretrain-1", "The folder of a run.")


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the script and return how many checkpoints there are and how many are whole; `argv` lets tests call it."""
    # 1. Arguments.
    [args] = parse_args(VerifyArguments, argv=argv, doc=__doc__)
    set_up_logging()
    folders = checkpoint_folders(Path(args.output_dir))
    if not folders:
        raise ValueError(
            f"--output_dir is {args.output_dir}; it holds no checkpoint-N folder. Give the folder of a run."
        )

    # 2. Read them all.
    wrong = {folder: verify(folder) for folder in tqdm(folders, desc="Verifying", unit="checkpoint", leave=False)}

    # 3. Say what was found.
    lines = [
        f"{folder.name:<24}{size_of(folder) / 2**20:>10,.1f} MiB   {'; '.join(found) or 'whole'}"
        for folder, found in wrong.items()
    ]
    logger.info("\n%s", "\n".join(lines))
    return {"checkpoints": len(folders), "whole": sum(not found for found in wrong.values())}


def run() -> None:
    """Exit with 1 unless all are whole."""
    found = main()
    sys.exit(int(found["whole"] < found["checkpoints"]))


if __name__ == "__main__":
    run_script(run)
