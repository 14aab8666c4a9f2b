"""What all tests share: groups of processes, started once."""

from collections.abc import Callable, Iterator

import pytest
from processes import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(n).run(function, *args)` runs a function on n ranks, on processes that all tests share."""
    pools: dict[int, Ranks] = {}

    def of_size(world_size: int) -> Ranks:
        if world_size not in pools:
            pools[world_size] = Ranks(world_size)
        return pools[world_size]

    yield of_size
    for pool in pools.values():
        pool.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.processes)
