"""Prepare data on the machines of a Ray cluster, with the result of one machine.

The launching process reads the sources and cuts them into the chunks of one machine, which Ray's actors check, decode and store on a
drive that all machines share; so rows, splits, report and digests are the same whatever the number of workers. Near copies are
searched by the actors, one choice of bands at a time, over hashes of 8 bytes. Ray starts a lost actor again, and what it was
doing; a job that was killed resumes, as on one machine, with the chunks that are on the drive.

Reading the sources takes 84 us of CPU a row in the launching process, so about 43 workers that decode photographs are kept busy.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
import ray
import torch

from mm_utils.data.prepare.arguments import Engine
from mm_utils.data.prepare.perceptual_hash import choices, pairs_of_choice


@ray.remote(max_restarts=-1, max_task_retries=-1)
class _Worker:
    """One process of the cluster, in the folder in which the command was given."""

    def __init__(self, folder: str):
        os.chdir(folder)
        torch.set_num_threads(1)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


def _search(hashes_N: np.ndarray, radius: int, place: int) -> np.ndarray:
    """Return the pairs of the choice at a place."""
    found = pairs_of_choice(hashes_N, radius, choices(len(hashes_N), radius)[place])
    return np.concatenate([np.empty((0, 2), dtype=np.int64), *found])


class RayPool(Executor):
    """Workers that take calls in turn; an error of Ray itself ends the call."""

    def __init__(self, workers: int, cores: float):
        made: Any = _Worker.options(num_cpus=cores)  # type: ignore[attr-defined]
        self._workers = [made.remote(os.getcwd()) for _ in range(workers)]
        self._calls = 0

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """Begin a call; see `concurrent.futures.Executor`."""
        worker = self._workers[self._calls % len(self._workers)]
        self._calls += 1
        return worker.call.remote(function, *args).future()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers; what they are doing is lost."""
        for worker in self._workers:
            ray.kill(worker)
        self._workers = []


def make_engine(workers: int, cores: float) -> Engine:
    """Return an engine of `workers` actors of the connected cluster, each with that number of cores."""

    def search(hashes_N: np.ndarray, radius: int, sift: Callable[[np.ndarray], Any]) -> Iterator[Any]:
        everywhere = ray.put(hashes_N)  # once for every machine
        with RayPool(workers, cores) as pool:
            calls = [pool.submit(_search, everywhere, radius, at) for at in range(len(choices(len(hashes_N), radius)))]
            for call in calls:
                pairs = call.result()
                yield from (sift(pairs[start : start + 65_536]) for start in range(0, len(pairs), 65_536))

    return Engine(lambda count: RayPool(count, cores), search, workers)
