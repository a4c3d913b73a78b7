"""Prepare data on the machines of a Ray cluster, with the result of one machine.

The launching process reads the sources and cuts them into the chunks of one machine, which Ray's actors check, decode and store on a
drive that all machines share. Ray starts a lost actor again, and what it was doing.
"""

import itertools
import os
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import ray
import torch


@ray.remote(max_restarts=-1, max_task_retries=-1)
class _Worker:
    """One process of the cluster, in the folder in which the command was given."""

    def __init__(self, folder: str):
        os.chdir(folder)
        torch.set_num_threads(1)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


class RayPool(Executor):
    """Workers that take calls in turn; an error of Ray itself ends the call."""

    def __init__(self, workers: int, cores: float):
        made: Any = _Worker.options(num_cpus=cores)  # type: ignore[attr-defined]
        self._workers = [made.remote(os.getcwd()) for _ in range(workers)]
        self._next = itertools.cycle(self._workers)

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """Begin a call; see `concurrent.futures.Executor`."""
        return next(self._next).call.remote(function, *args).future()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers; what they are doing is lost."""
        for worker in self._workers:
            ray.kill(worker)
