"""The one owner of the ledger: a Monarch shell around `WaitingReplay`, with the learner ranks' shares of a batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from forge_async.actors.forge_actor import ForgeActor, concurrent_endpoint
from forge_async.core.compact import Records
from forge_async.core.records import Group, bounds
from forge_async.core.versions import PolicyVersion
from forge_async.learner.batch import Share, split_batch
from forge_async.learner.layout import Layout
from forge_async.replay.admission import Admission, Prompts
from forge_async.replay.journal import Journal
from forge_async.replay.settings import AsyncSettings
from forge_async.replay.state import ReplayState
from forge_async.replay.waiting import PATIENCE_S, WaitingReplay


class ReplayActor(ForgeActor):
    """Every call is quick or waits on one condition, with a deadline that its caller sets."""

    def __init__(
        self,
        settings: AsyncSettings,
        *,
        groups_per_step: int,
        prompts: Prompts,
        num_steps: int | None = None,
        groups_at_once: int | None = None,
        tokens_guess: int = 1024,
        journal_path: str = "",
        keep_zero_advantage: bool = False,
        layout: Layout | None = None,
        resume_from: PolicyVersion | None = None,
    ) -> None:
        """Without `journal_path` nothing is written, and the run cannot be resumed.

        `resume_from` is the version that the learner goes on from, with the history in the journal.
        """

        def make_state() -> ReplayState:
            common: dict[str, Any] = {
                "settings": settings,
                "groups_per_step": groups_per_step,
                "prompts": prompts,
                "num_steps": num_steps,
                "groups_at_once": groups_at_once,
                "tokens_guess": tokens_guess,
                "journal": Journal.open(journal_path) if journal_path else None,
            }
            if resume_from is None:
                return ReplayState(**common)
            step, incarnation = resume_from.step, resume_from.incarnation
            events = list(Journal.read(journal_path))  # all: a later restoring says which of them count
            return ReplayState.resume(events, step=step, incarnation=incarnation, **common)

        self._make_state: Callable[[], ReplayState] = make_state
        self._keep_zero_advantage, self._layout = keep_zero_advantage, layout
        self._shares: dict[int, tuple[list[Share], dict[str, Any]]] = {}
        """Of the step taken last and the one before: a learner rank may ask for one while another asks for the next."""

    async def setup(self) -> None:
        self._replay = WaitingReplay(self._make_state())

    async def teardown(self) -> None:
        await self._replay.close("the run ended")

    @concurrent_endpoint
    async def admit(self, replica: str, max_groups: int, deadline_s: float = PATIENCE_S) -> list[Admission]:
        """Groups for a replica to make, at least one; none only when the run is closed.

        Raises StallError after `deadline_s` seconds, saying what stands in the way, unless the steps to come need no
        more groups: then the wait goes on until the last step is done.
        """
        return Records(await self._replay.admit(replica, max_groups, deadline_s))

    @concurrent_endpoint
    async def generated(self, tries: Sequence[tuple[int, int]]) -> None:
        """The tokens of these groups, (index, attempt), are all made."""
        await self._replay.generated(tries)

    @concurrent_endpoint
    async def put(self, groups: Sequence[Group]) -> None:
        """Take in scored groups."""
        await self._replay.put(groups)

    @concurrent_endpoint
    async def end(self, index: int, outcome: str, reason: str, attempt: int) -> None:
        """End a group without training on it."""
        await self._replay.end(index, outcome, reason, attempt)

    @concurrent_endpoint
    async def retry(self, index: int, reason: str, attempt: int) -> bool:
        """A try came to nothing: make the group anew, or end it as failed. Returns whether it is made anew."""
        return await self._replay.retry(index, reason, attempt)

    @concurrent_endpoint
    async def take(self, step: int, deadline_s: float = PATIENCE_S) -> list[Group]:
        """The batch of `step`, sorted by admission index, for a loop that trains on it itself.

        Raises StallError after `deadline_s` seconds, saying which groups are missing.
        """
        return await self._replay.take(step, deadline_s)

    @concurrent_endpoint
    async def take_share(
        self, step: int, batch_rank: int, batch_ranks: int, deadline_s: float, num_done: int = 0
    ) -> tuple[Share, dict[str, Any]]:
        """A learner rank's share of the batch of `step`, and a small record of the whole batch.

        `num_done`: steps that the learner has done, as `trained` would tell.

        Raises StallError after `deadline_s` seconds, saying which groups are missing.
        """
        await self._replay.trained(num_done - 1)
        if step not in self._shares:
            groups = await self._replay.take(step, deadline_s)
            if step not in self._shares:  # another rank's call may have waited for it too
                self._keep_shares(step, groups, batch_ranks)
        shares, record = self._shares[step]
        return shares[batch_rank], record

    @concurrent_endpoint
    async def trained(self, step: int) -> None:
        """The steps up to `step` are done."""
        await self._replay.trained(step)

    @concurrent_endpoint
    async def published(self, step: int) -> None:
        """Version `step` can be pulled, so the steps that it comes after are done."""
        await self._replay.published(step)

    @concurrent_endpoint
    async def pulled(self, replica: str, step: int) -> None:
        """A replica serves version `step`."""
        await self._replay.pulled(replica, step)

    @concurrent_endpoint
    async def add_replica(self, replica: str, step: int) -> None:
        """A replica that serves version `step` may be given groups."""
        await self._replay.add_replica(replica, step)

    @concurrent_endpoint
    async def set_max_staleness(self, max_staleness: int) -> None:
        """Start groups under another bound on age from here on."""
        await self._replay.set_max_staleness(max_staleness)

    @concurrent_endpoint
    async def state(self) -> dict[str, float]:
        """Figures under the names of metrics.jsonl."""
        return await self._replay.state()

    @concurrent_endpoint
    async def why(self) -> str:
        """What the next step waits for, in one sentence without full stop."""
        return await self._replay.why()

    @concurrent_endpoint
    async def close(self, reason: str) -> dict[str, float]:
        """Cancel what has not ended; everybody who waits is let go. Returns the final figures."""
        return await self._replay.close(reason)

    def _keep_shares(self, step: int, groups: Sequence[Group], batch_ranks: int) -> None:
        shares = split_batch(groups, batch_ranks, keep_zero_advantage=self._keep_zero_advantage, layout=self._layout)
        record = _describe(groups, self._replay.inner)
        before = {key: kept for key, kept in self._shares.items() if key == step - 1}
        self._shares = before | {step: (shares, record)}


def _describe(groups: Sequence[Group], state: ReplayState) -> dict[str, Any]:
    """What the run's records want to know of a batch."""
    rewards = np.concatenate([group.rewards for group in groups])
    starts = bounds(np.array([len(group.rewards) for group in groups]))[:-1]
    lowest, highest = np.minimum.reduceat(rewards, starts), np.maximum.reduceat(rewards, starts)
    return {
        "indices": [group.index for group in groups],
        "ended": state.take_ended(),
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/zero_variance_fraction": float(np.mean(lowest == highest)),
        "tokens/batch": int(sum(group.samples.num_tokens for group in groups)),
        "taken_s": time.time(),
        **state.state(),
    }
