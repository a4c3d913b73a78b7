"""The processes of one start find each other, whoever of them was restarted."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from mm_utils.run.rendezvous import rendezvous

LONG = 30.0


def prefixes(store: dist.Store, world_size: int) -> set[str]:
    """Return the prefixes that the ranks of one start get."""
    with ThreadPoolExecutor(world_size) as pool:
        return set(pool.map(lambda rank: rendezvous(store, rank, world_size, LONG), range(world_size)))


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_all_ranks_of_a_start_get_one_prefix_and_every_start_another(world_size: int) -> None:
    store = dist.HashStore()
    found = [prefixes(store, world_size) for _ in range(3)]
    assert [len(each) for each in found] == [1, 1, 1]
    assert len(set.union(*found)) == 3


def test_a_start_does_not_wait_for_processes_of_the_start_before() -> None:
    """The first start ends because its rank 1 is missing."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        ended = [pool.submit(rendezvous, store, rank, 3, 0.5) for rank in (0, 2)]
        with pytest.raises(TimeoutError, match="process 0 waited 0 s for process 1, or for others"):
            ended[0].result()
        with pytest.raises(TimeoutError, match="process 2 waited 0 s for process 0, or for others"):
            ended[1].result()
    assert len(prefixes(store, 3)) == 1


def test_rank_0_may_be_restarted_while_others_wait() -> None:
    """They drop the prefix of the rank 0 that is gone for that of the next."""
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        waiting = pool.submit(rendezvous, store, 1, 3, LONG)
        with pytest.raises(TimeoutError):
            rendezvous(store, 0, 3, 0.5)
        others = [pool.submit(rendezvous, store, rank, 3, LONG) for rank in (0, 2)]
        assert len({each.result() for each in [waiting, *others]}) == 1
