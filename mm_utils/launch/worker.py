"""What a worker of Ray Train does: run a script's `main` in a thread of Ray's actor, whose folder is left for the command's."""

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mm_utils.arguments import LAUNCH_VARIABLE
from mm_utils.data.batches.workers import end_workers
from mm_utils.distributed import PeerError, RunError
from mm_utils.run.restarts import LAUNCHER_VARIABLE
from mm_utils.text import passes_own_code, redact


def work(task: Mapping[str, Any]) -> dict[str, float]:
    """Run the script, and return its metrics; called by Ray on every worker.

    Args:
        task: `script`, `argv`, `folder` and `launcher` of the command, `launch`, the name of this launch, and `on_cpu`.

    Raises:
        Refused: if the script ends with a user's mistake.
    """
    from mm_utils.launch.refusals import Refused

    try:
        prepare(task)
        return load_main(task["script"])(list(task["argv"]))
    except PeerError:
        raise  # the other process may be started again
    except (RunError, ValueError, FloatingPointError) as error:  # those of `run_script`
        text = "".join(traceback.format_exception(error)) if passes_own_code(error) else str(error)
        raise Refused(redact(text)) from error
    except SystemExit as error:
        raise Refused(f"the script ended with exit status {error.code}; its message is above.") from error
    finally:
        end_workers()


def prepare(task: Mapping[str, Any]) -> None:
    """Set what `accelerate launch` and the shell would have set.

    Raises:
        ValueError: if this machine does not have the command's folder.
    """
    try:
        os.chdir(task["folder"])
    except OSError as error:
        raise ValueError(
            f"the command was given in {task['folder']}; a machine of Ray cannot enter it: {error.strerror}. Start from a "
            "folder that all machines share, or with ray job submit --working-dir ."
        ) from error
    sys.argv = [os.path.relpath(task["script"]), *task["argv"]]
    os.environ |= {LAUNCHER_VARIABLE: task["launch"], LAUNCH_VARIABLE: task["launcher"]}
    if task["on_cpu"]:
        os.environ["ACCELERATE_USE_CPU"] = "true"


def load_main(path: str) -> Callable[..., dict[str, float]]:
    """Return the `main` of a script; raise ValueError if it has none."""
    name = f"scripts.{Path(path).stem}"  # whose log is shown
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    if not callable(main := getattr(module, "main", None)):
        raise ValueError(
            f"the script is {path}; it has no main(argv). Give a script that trains, embeds or evaluates."
        )
    return main
