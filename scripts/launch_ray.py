"""Train on a Ray cluster: Ray starts the workers of a training script, restarts lost ones, and adds or removes some.

Two workers on this machine; the words after the script are its own (pip install "ray[train,tune]"):
    python scripts/launch_ray.py --num_workers 2 scripts/pretrain.py --config recipes/tiny.yaml --output_dir outputs/mine

A cluster that runs, one GPU a worker; the folders are on a drive that all machines share:
    ray job submit --working-dir . -- python scripts/launch_ray.py --num_workers 16 --mixed_precision bf16 \\
        --storage_path /shared/ray scripts/pretrain.py --dataset_name /shared/data --output_dir /shared/mine

Machines that come and go; after a change, training goes on from the newest checkpoint:
    python scripts/launch_ray.py --address auto --num_workers 2:8 --max_failures 20 \\
        scripts/pretrain.py --dataset_name /shared/data --output_dir /shared/mine --save_steps 200

Data that are prepared by 32 processes of the cluster:
    python scripts/launch_ray.py --address auto --num_workers 32 scripts/prepare_data.py --sources "/shared/web-{000..999}.tar" \\
        --output_dir /shared/data

An index that 32 processes of the cluster embed:
    python scripts/launch_ray.py --address auto --num_workers 32 scripts/embed.py --model_name_or_path /shared/mine \\
        --images /shared/photos --index_dir /shared/index

A sweep; every trial has a folder in --output_dir, and a table names the best:
    python scripts/launch_ray.py --tune "learning_rate=3e-4,1e-3;seed=1,2" scripts/pretrain.py --output_dir outputs/sweep
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mm_utils.arguments import parse_args, parse_first
from mm_utils.launch.arguments import LaunchArguments, read_command, split_words

if __name__ == "__main__":
    parse_first(LaunchArguments, doc=__doc__, argv=split_words(sys.argv[1:])[0])

from mm_utils.run.script import run_script, set_up_logging


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Launch the script and return its metrics, those of the best trial of a sweep."""
    # 1. Arguments: the launcher's, the script, the script's.
    own, script, words = split_words(sys.argv[1:] if argv is None else argv)
    args = parse_args(LaunchArguments, argv=own, doc=__doc__)[LaunchArguments]
    command = read_command(args, script, words)
    prepares = Path(command.script).stem == "prepare_data"
    if prepares and args.tune is not None:
        raise ValueError(f"--tune is {args.tune}; preparing data has no trials. Leave it out.")
    set_up_logging()

    # 2. Ray: a cluster that runs, or a small one on this machine.
    from mm_utils.launch.cluster import connect, fit
    from mm_utils.launch.sweep import sweep

    with connect(args) as resources:
        # 3. Prepare data, in this process with the cluster's; or train, in the cluster's alone.
        if prepares:
            from mm_utils.launch.preparing import RayPool
            from mm_utils.launch.worker import load_main

            words = [*command.argv, "--num_proc", str(args.workers[1])]
            return load_main(command.script)(words, lambda count: RayPool(count, resources["CPU"]))
        name = f"{Path(command.script).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"  # unlike all others
        return (fit if args.tune is None else sweep)(args, command, resources, name)


if __name__ == "__main__":
    run_script(main)
