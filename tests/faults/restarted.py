"""A script for launchers that restart their processes: a tiny run, one process of which is killed in every start but the last.

accelerate launch --max_restarts 3 -m tests.faults.restarted FOLDER SEED KILLS
"""

import os
import random
import sys
from dataclasses import replace
from pathlib import Path

import torch

from mm_utils import distributed
from mm_utils.arguments import Parsed
from mm_utils.checkpointing.files import find_checkpoint
from mm_utils.run.restarts import RestartRecord
from mm_utils.run.start import RunArguments, run_script, start_run
from mm_utils.training.arguments import TrainingArguments
from tests.faults import rank_runs
from tests.faults.rank_runs import Fault, Sleep, Striker
from tests.kit.tiny_run import STEPS, TinyRun, build


def main() -> None:
    folder, seed, kills = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    args = TrainingArguments(output_dir=str(folder))
    start_run("tiny", Parsed([args, RunArguments()]))
    begun = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    faults = [Fault(Sleep(0.1), "end", 0, None, times=STEPS)]  # for checkpoints to be complete a step later
    if begun < kills:
        random.seed(100 * seed + begun)
        step, place = random.choice(range(2, 5)) + 3 * begun, random.choice(["batch", "forward", "backward", "end"])
        faults.append(Fault(rank_runs.kill, place, min(step, STEPS), random.randrange(distributed.world_size())))
    rank_runs.notes_of(folder).mkdir(exist_ok=True)
    striker = Striker(faults, rank_runs.notes_of(folder), begun)
    trainer = build(replace(TinyRun(folder), strike=striker), [])
    trainer.callbacks.callbacks.append(RestartRecord())
    striker.watch(trainer)
    trainer.train(find_checkpoint(args.resume_from_checkpoint, folder))


if __name__ == "__main__":
    run_script(main)
