"""The bound on age (Law 2) as arithmetic: which dials go together, and how much room a replica has.

`docs/staleness.md` proves what stands here. Steps count learner updates: step s consumes with version s and makes
version s + 1, and before its first update the learner is at version 0.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from forge_async.core.errors import ConfigError
from forge_async.replay.settings import PRESET_AGES, AsyncSettings

UNLIMITED = sys.maxsize
"""Room, window and age of the preset `stream`."""

AUTO_BEGINS_WITH = 2
"""S of `async.max_staleness=auto` before anything is measured, where window and cap allow it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The dials as they act together; `effective` makes one from the settings, and every instance is legal."""

    max_staleness: int
    """S, in steps; UNLIMITED for `stream`."""
    window: int
    """W, in groups; 1 is strict order, UNLIMITED for `stream`."""
    groups_per_step: int
    """P, groups that one step consumes (of the lane that the bound is for)."""
    publish_every: int
    """k, steps between publications."""

    def __post_init__(self) -> None:
        check_combination(self.max_staleness, self.window, self.groups_per_step, self.publish_every)

    @property
    def bounded(self) -> bool:
        """False for `stream`, which has no bound on age."""
        return self.max_staleness < UNLIMITED

    @property
    def synchronous(self) -> bool:
        """True at S = 0, where groups are admitted in rounds."""
        return self.max_staleness == 0

    @property
    def depth(self) -> int:
        """(S+1)·P - (W-1): most groups that may be untaken, or taken without the replica knowing it."""
        if not self.bounded:
            return UNLIMITED
        return (self.max_staleness + 1) * self.groups_per_step - (self.window - 1)

    def room(self, num_ahead: int, steps_unpulled: int) -> int:
        """How many groups a replica may be given now; 0 or less: none.

        Args:
            num_ahead: untaken groups (waiting, in flight or ready) admitted before the one to be given.
            steps_unpulled: steps that have taken a batch and whose result the replica has not pulled.
        """
        return self.depth - num_ahead - self.groups_per_step * steps_unpulled

    def publishes(self, step: int) -> bool:
        """Whether version `step` is one of those that are published."""
        return step % self.publish_every == 0


def check_combination(max_staleness: int, window: int, groups_per_step: int, publish_every: int) -> None:
    """Raise ConfigError unless some replica can always be given the next batch (1 <= W <= (S-k+1)·P + 1)."""
    if max_staleness < 0 or groups_per_step < 1 or publish_every < 1 or window < 1:
        raise ConfigError(
            f"max_staleness={max_staleness}, window={window}, groups_per_step={groups_per_step} and "
            f"publish_every={publish_every}: the first must be 0 or more, the others 1 or more."
        )
    if max_staleness == UNLIMITED:
        return
    if max_staleness < publish_every - 1:
        raise ConfigError(
            f"async.publish_every={publish_every} makes samples up to {publish_every - 1} steps old, which "
            f"async.max_staleness={max_staleness} forbids; set async.max_staleness={publish_every - 1} or more, or "
            f"async.publish_every={max_staleness + 1} or less."
        )
    widest = (max_staleness - publish_every + 1) * groups_per_step + 1
    if window > widest:
        raise ConfigError(
            f"async.window={window} would leave no room for a whole batch: with async.max_staleness={max_staleness}, "
            f"groups_per_step={groups_per_step} and async.publish_every={publish_every} set async.window={widest} or "
            "less."
        )


def effective(settings: AsyncSettings, groups_per_step: int) -> Bound:
    """The bound that the dials and the preset `async.buffer` ask for. Raises ConfigError for what cannot work.

    With `async.fresh_fraction` it is the bound of the groups that need not be fresh. With `async.max_staleness=auto` it
    is the one that the run begins with.
    """
    if settings.on_stale == "reweight" and settings.correction == "none":
        raise ConfigError(
            "async.on_stale=reweight leaves too old groups to the importance correction, so async.correction=none "
            "does not go with it; set async.correction=token_is, or async.on_stale=wait."
        )
    age, window = _age_and_window(settings, groups_per_step - num_fresh(settings, groups_per_step))
    if settings.fresh_fraction and age == 0:
        raise ConfigError(
            f"async.fresh_fraction={settings.fresh_fraction:g} does nothing at max_staleness=0, where every group is "
            "made by the newest version; set it to 0, or async.max_staleness=1 or more."
        )
    return Bound(
        max_staleness=age,
        window=window,
        groups_per_step=groups_per_step - num_fresh(settings, groups_per_step),
        publish_every=settings.publish_every,
    )


def num_fresh(settings: AsyncSettings, groups_per_step: int) -> int:
    """Groups of each step that the newest version makes wholly. Raises ConfigError for what cannot work."""
    fraction, num = settings.fresh_fraction, int(settings.fresh_fraction * groups_per_step + 0.5)
    if fraction and num == 0:
        raise ConfigError(
            f"async.fresh_fraction={fraction:g} is less than half a group of groups_per_step={groups_per_step}; set it "
            f"to {1 / groups_per_step:g} or more, or to 0."
        )
    if fraction and num == groups_per_step:
        raise ConfigError(
            f"async.fresh_fraction={fraction:g} leaves no group of groups_per_step={groups_per_step} to async."
            "max_staleness; set async.max_staleness=0 and async.fresh_fraction=0, which is that."
        )
    if fraction and settings.publish_every > 1:
        raise ConfigError(
            f"async.fresh_fraction={fraction:g} needs the newest version in every step, so "
            f"async.publish_every={settings.publish_every} does not go with it; set async.publish_every=1."
        )
    return num


def least_staleness(window: int, groups_per_step: int, publish_every: int) -> int:
    """The least S, above 0, that `check_combination` allows."""
    return max(1, publish_every - 1 - (1 - window) // groups_per_step)


def _age_and_window(settings: AsyncSettings, groups_per_step: int) -> tuple[int, int]:
    if settings.buffer == "stream":
        if settings.correction == "none":
            raise ConfigError("async.buffer=stream has no bound on age, so it needs async.correction=token_is.")
        return UNLIMITED, UNLIMITED
    if settings.buffer in PRESET_AGES:
        return PRESET_AGES[settings.buffer], 1
    if settings.order == "fifo" and settings.window > 1:
        raise ConfigError(
            f"async.order=fifo never looks past a straggler, so async.window={settings.window} would only cost depth; "
            "set async.window=1, or async.order=windowed_fifo."
        )
    if isinstance(settings.max_staleness, int):
        return settings.max_staleness, settings.window
    least = least_staleness(settings.window, groups_per_step, settings.publish_every)
    if settings.max_staleness_cap < least:
        raise ConfigError(
            f"async.max_staleness_cap={settings.max_staleness_cap} is below {least}, the least that "
            f"async.window={settings.window} and async.publish_every={settings.publish_every} need; set it to {least} "
            "or more."
        )
    return min(max(AUTO_BEGINS_WITH, least), settings.max_staleness_cap), settings.window


def tokens_allow(
    num_untaken: int, queue_tokens: int, estimate_tokens: int, max_queue_tokens: int, groups_per_step: int
) -> bool:
    """Whether the token cap lets one more group in.

    The cap never holds back the next batch (a cap below a batch's tokens would otherwise stop the run for ever), so
    memory stays below the larger of the cap and one batch; with P = 1 an oversize group is admitted alone.

    Args:
        num_untaken: groups waiting, in flight or ready.
        queue_tokens: their tokens, estimated where they are not ready yet.
        estimate_tokens: tokens that the new group is expected to have.
        max_queue_tokens: the cap.
        groups_per_step: P.
    """
    return num_untaken < groups_per_step or queue_tokens + estimate_tokens <= max_queue_tokens
