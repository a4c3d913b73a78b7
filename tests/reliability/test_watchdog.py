"""Where a process hangs is looked up in the thread that trains; `tests/faults/test_processes.py` lets real ones hang."""

import os
import threading
import time
from pathlib import Path

from mm_utils import distributed
from mm_utils.reliability.watchdog import HangDetection
from tests.kit.tiny_run import alone


def hangs_here(file: str) -> None:
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), 2)
    distributed.world_size = lambda: 2

    def trains_here() -> None:
        with HangDetection(0.2) as detection:
            detection._phase = "data"
            time.sleep(60)

    thread = threading.Thread(target=trains_here)  # under Ray it is not the main thread
    thread.start()
    thread.join()


def test_the_place_is_that_of_the_thread_that_trains(tmp_path: Path) -> None:
    assert alone(hangs_here, str(tmp_path / "said"))[0] == 1
    said = (tmp_path / "said").read_text()
    assert "has been in 'data' of step 0 for 0 s, at test_watchdog.py:" in said
    assert "in trains_here. --ddp_timeout is 0 s" in said
