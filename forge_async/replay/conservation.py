"""Law 1 counted anew, group by group: what the ledger's counters say must be what its entries are."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from forge_async.replay.entry import UNTAKEN, State

if TYPE_CHECKING:
    from forge_async.replay.book import Book


def recount(ledger: Book) -> bool:
    """Whether every counter and index of the ledger agrees with the groups that it holds."""
    live = [entry for entry in ledger.entries.values() if entry.state is not State.ENDED]
    untaken = [entry for entry in live if entry.state in UNTAKEN]
    in_flight = [entry for entry in live if entry.state is State.IN_FLIGHT]
    num_of = {state: sum(entry.state is state for entry in live) for state in State}
    num_of[State.ENDED] = ledger.num_admitted - len(live)
    return (
        all(ledger.counts[state] == num_of[state] for state in State)
        and ledger.untaken == sorted(entry.index for entry in untaken)
        and ledger.fresh == sorted(entry.index for entry in untaken if entry.fresh)
        and ledger.in_flight == Counter(entry.replica for entry in in_flight)
        and ledger.fresh_in_flight == Counter(entry.replica for entry in in_flight if entry.fresh)
        and ledger.queue_tokens == sum(entry.num_tokens for entry in untaken)
        and ledger.ready == {entry.index: entry.oldest_step for entry in live if entry.state is State.READY}
        and sorted(index for batch in ledger.taken.values() for index in batch)
        == sorted(entry.index for entry in live if entry.state is State.TAKEN)
    )
