"""What a replica is given, and which prompt comes next."""

from __future__ import annotations

from dataclasses import dataclass

from forge_async.core.compact import Compact
from forge_async.core.records import PromptId


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission(Compact):
    """A group that a replica is to make now."""

    index: int
    prompt_id: PromptId
    min_step: int
    """Version below which no token of the group may be made: it moves only to replicas at or above it (Law 4)."""
    attempt: int
    """Number of this try; give it back with `end`, so that a late report of an old try ends nothing."""
    fresh: bool = False
    """Whether the step in progress waits for it: a fresh group, which an engine should make first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The source that groups are admitted from. Order inside an epoch is the source's matter."""

    source: str
    """Name of the source."""
    epoch_size: int
    """Prompts of one epoch."""

    def after(self, last: PromptId | None) -> PromptId:
        """The prompt that follows `last`; the first one after None, or when the source has another name now."""
        if last is None or last.source != self.source:
            return PromptId(source=self.source, epoch=0, index=0)
        if last.index + 1 < self.epoch_size:
            return PromptId(source=self.source, epoch=last.epoch, index=last.index + 1)
        return PromptId(source=self.source, epoch=last.epoch + 1, index=0)
