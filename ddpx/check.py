"""Do all ranks make the same call? Said in the users' words, on every rank.

A call is known by its text, such as `all_reduce(float32[1000], op=sum)`. Texts meet on the group's board: before a call
whose plan is new, before each call under `check=True`, and after a failure, to find out whether that was the reason.
"""

import time

from ddpx.group import Group, ranks_text

HEARD_S = 1.0  # how long after a failure to wait for what the others were doing; they hear of it within 0.1 s


def agree(group: Group, number: int, text: str) -> tuple[int, str]:
    """(the largest number, an error's text unless all ranks have come with the same call). A collective."""
    notes = group.gather("the agreement on a collective call", (number, text))
    calls = {rank: f"call {number}: {text}" for rank, (number, text) in enumerate(notes)}
    return max(number for number, _ in notes), differing(calls) if len(set(calls.values())) > 1 else ""


def differing(calls: dict[int, str]) -> str:
    """Calls by rank, alike ones together, as an error's text."""
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(calls.items()):
        by_text.setdefault(text, []).append(rank)
    lines = [f"  {ranks_text(ranks)}: {text}" for text, ranks in by_text.items()]
    return (
        "ranks make different calls:\n" + "\n".join(lines) + "\n"
        "Every rank of a group has to make the same calls, of the same shapes, types and operations, in the same order."
    )


def heard(group: Group, number: int, text: str, wait_s: float = HEARD_S) -> dict[int, str]:
    """Tell the others in which call this rank failed; what those that tell as well, within `wait_s`, were in."""
    calls = {group.rank: f"call {number}: {text}"}
    store = group.store("failed calls")
    store.set(str(group.rank), calls[group.rank])
    until = time.monotonic() + wait_s
    while len(calls) < group.world_size and time.monotonic() < until:
        time.sleep(0.01)
        for rank in range(group.world_size):
            if rank not in calls and store.check([str(rank)]):
                calls[rank] = store.get(str(rank)).decode()
    return calls
