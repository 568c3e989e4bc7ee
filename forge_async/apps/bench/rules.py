"""`bench rules`: one trace of groups played under the admission rule of this project and under those of others.

A trace says how long each prompt drawn takes and which tries fail. It is made from a fixed seed, or read from a run's
events.jsonl (`--trace`). Time is simulated: a learner that takes a fixed time a step, replicas with slots, each pulling
a version some time after it was made. The other rules are written down here as they are commonly described.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, Protocol

import numpy as np

from forge_async.apps.bench.output import Report
from forge_async.apps.bench.plan import Plan
from forge_async.core.errors import ConfigError
from forge_async.core.records import Group, PromptId, Samples
from forge_async.core.rng import stream
from forge_async.core.versions import PolicyVersion, VersionRuns
from forge_async.observe.group_events import EVENT
from forge_async.replay.admission import Prompts
from forge_async.replay.settings import AsyncSettings
from forge_async.replay.state import ReplayState

GROUPS_PER_STEP, MAX_STALENESS, STEP_S, NUM_STEPS = 32, 3, 10.0, 200
PULL_S = (0.5, 1.0, 2.0, 12.0)
"""Seconds from a step's end to each replica's new weights; one replica is slow."""
SLOW_SHARE, SLOW_S, FAST_S, FAIL_SHARE = 0.1, 55.0, 6.0, 0.01
SETTLED = 20 * GROUPS_PER_STEP
"""Prompts drawn this long before the newest that was trained have met their fate, and count."""
SPARE = 1.15
"""Slots beyond those that keep up with the learner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What happens to prompt number i of the drawing order, whichever rule draws it; used again from its beginning."""

    latency_s: np.ndarray
    """float [N], seconds from a group's first token to its rewards."""
    fails: np.ndarray
    """bool [N], whether its first try fails."""
    slow: np.ndarray
    """bool [N], the class that rules may starve."""

    @classmethod
    def seeded(cls, seed: int, num_prompts: int = 4000) -> Trace:
        """A tenth of the prompts takes about five and a half steps, the others about half a step."""
        random = stream(seed, "rules")
        slow = random.random(num_prompts) < SLOW_SHARE
        spread = np.exp(0.4 * random.standard_normal(num_prompts) - 0.08)
        return cls(
            latency_s=np.where(slow, SLOW_S, FAST_S) * spread, fails=random.random(num_prompts) < FAIL_SHARE, slow=slow
        )

    @classmethod
    def recorded(cls, path: Path) -> Trace:
        """From a run's events.jsonl, in order of admission; the slowest tenth is the slow class. Raises ConfigError."""
        try:
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            events = sorted((one for one in lines if EVENT not in one), key=lambda one: one["index"])
            made = [one for one in events if one["scored_s"] is not None or one["outcome"] == "failed"]
            latency_s = np.array([(one["scored_s"] or one["ended_s"]) - one["admitted_s"] for one in made])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--trace {path} is not an events.jsonl of a run: {error!r}.") from error
        if len(made) < 10 * GROUPS_PER_STEP:
            raise ConfigError(
                f"--trace {path} has {len(made)} groups that were made; {10 * GROUPS_PER_STEP} are needed."
            )
        scale = FAST_S / float(np.median(latency_s))
        return cls(
            latency_s=latency_s * scale,
            fails=np.array([one["outcome"] == "failed" for one in made]),
            slow=latency_s > np.quantile(latency_s, 1.0 - SLOW_SHARE),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """A group on its way."""

    key: int
    """Unique; what the rule knows it by."""
    prompt: int
    """Number in the order of drawing."""
    version: int
    """That its first token is of."""
    retry: bool = False


class Rule(Protocol):
    """Decides what is started, and what a step trains on."""

    def admit(self, replica: str) -> Try | None: ...
    def put(self, made: Try) -> None: ...
    def fail(self, lost: Try) -> None: ...
    def take(self, step: int) -> list[Try] | None: ...
    def trained(self, step: int) -> None: ...
    def pulled(self, replica: str, step: int) -> None: ...


class Ours:
    """The product's ReplayState: a replica has room again once it has pulled what a step made."""

    def __init__(self, replicas: Sequence[str], window: int = 1) -> None:
        self._state = ReplayState(
            settings=AsyncSettings(max_staleness=MAX_STALENESS, window=window),
            groups_per_step=GROUPS_PER_STEP,
            prompts=Prompts(source="trace", epoch_size=10**9),
            tokens_guess=1,
        )
        self._tries: dict[int, Try] = {}
        self._attempts: dict[int, int] = {}
        self.versions = dict.fromkeys(replicas, 0)
        for replica in replicas:
            self._state.add_replica(replica, 0)

    def admit(self, replica: str) -> Try | None:
        for one in self._state.admit(replica, 1):
            self._attempts[one.index] = one.attempt
            self._tries[one.index] = Try(key=one.index, prompt=one.prompt_id.index, version=self.versions[replica])
            return self._tries[one.index]
        return None

    def put(self, made: Try) -> None:
        self._state.put([_group(made)])

    def fail(self, lost: Try) -> None:
        self._state.end(lost.key, "failed", "the trace says so", self._attempts[lost.key])

    def take(self, step: int) -> list[Try] | None:
        groups = self._state.take(step)
        return None if groups is None else [self._tries.pop(group.index) for group in groups]

    def trained(self, step: int) -> None:
        self._state.trained(step)
        self._state.published(step + 1)

    def pulled(self, replica: str, step: int) -> None:
        self.versions[replica] = step
        self._state.pulled(replica, step)


class Barrier(Ours):
    """As ours, but room comes back for all replicas together, when the last of them has pulled."""

    def __init__(self, replicas: Sequence[str]) -> None:
        super().__init__(replicas)
        self._seen = dict.fromkeys(replicas, 0)

    def pulled(self, replica: str, step: int) -> None:
        self._seen[replica] = step
        everywhere = min(self._seen.values())
        for name, known in list(self.versions.items()):
            if known < everywhere:
                super().pulled(name, everywhere)


class Stream:
    """Replicas are never held back, and a step trains on whatever was ready first, however old."""

    def __init__(self, replicas: Sequence[str]) -> None:
        self.versions = dict.fromkeys(replicas, 0)
        self._drawn, self._keys = itertools.count(), itertools.count()
        self._again: deque[int] = deque()
        self._ready: deque[Try] = deque()

    def admit(self, replica: str) -> Try | None:
        retry = bool(self._again)
        prompt = self._again.popleft() if retry else next(self._drawn)
        return Try(key=next(self._keys), prompt=prompt, version=self.versions[replica], retry=retry)

    def put(self, made: Try) -> None:
        self._ready.append(made)

    def fail(self, lost: Try) -> None:
        pass

    def take(self, step: int) -> list[Try] | None:
        if len(self._ready) < GROUPS_PER_STEP:
            return None
        return [self._ready.popleft() for _ in range(GROUPS_PER_STEP)]

    def trained(self, step: int) -> None:
        pass

    def pulled(self, replica: str, step: int) -> None:
        self.versions[replica] = step


class DiscardAndRequeue(Stream):
    """Replicas are never held back; what is older than S when a step could take it is thrown away and made again."""

    def take(self, step: int) -> list[Try] | None:
        old = [one for one in self._ready if step - one.version > MAX_STALENESS]
        self._again.extend(one.prompt for one in old)
        self._ready = deque(one for one in self._ready if step - one.version <= MAX_STALENESS)
        return super().take(step)


@dataclass(slots=True)
class Play:
    """One trace under one rule. Events are (time, order, what, argument)."""

    rule: Any
    trace: Trace
    slots: dict[str, int]
    """Free slots of each replica."""
    events: list[tuple[float, int, str, Any]] = field(default_factory=list)
    order: itertools.count = field(default_factory=itertools.count)
    step: int = 0
    training: bool = False
    stepped_s: list[float] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    started: list[Try] = field(default_factory=list)
    trained: list[Try] = field(default_factory=list)

    def run(self) -> None:
        """Until the last step is done."""
        now_s = 0.0
        self._react(now_s)
        while self.step < NUM_STEPS:
            now_s, _, what, argument = heapq.heappop(self.events)
            getattr(self, f"_{what}")(now_s, argument)
            self._react(now_s)

    def _at(self, when_s: float, what: str, argument: Any) -> None:
        heapq.heappush(self.events, (when_s, next(self.order), what, argument))

    def _react(self, now_s: float) -> None:
        if not self.training and (batch := self.rule.take(self.step)) is not None:
            self.training = True
            self.ages += [self.step - one.version for one in batch]
            self.trained += batch
            self._at(now_s + STEP_S, "done", None)
        for replica in sorted(self.slots, key=lambda name: -self.slots[name]):
            while self.slots[replica] and (one := self.rule.admit(replica)) is not None:
                self.slots[replica] -= 1
                self.started.append(one)
                number = one.prompt % len(self.trace.latency_s)
                self._at(now_s + float(self.trace.latency_s[number]), "made", (replica, one))

    def _made(self, now_s: float, made: tuple[str, Try]) -> None:
        replica, one = made
        self.slots[replica] += 1
        failed = bool(self.trace.fails[one.prompt % len(self.trace.fails)]) and not one.retry
        (self.rule.fail if failed else self.rule.put)(one)

    def _done(self, now_s: float, _: None) -> None:
        self.rule.trained(self.step)
        self.step += 1
        self.training = False
        self.stepped_s.append(now_s)
        for replica, pull_s in zip(self.slots, PULL_S, strict=True):
            self._at(now_s + pull_s, "pulled", (replica, self.step))

    def _pulled(self, now_s: float, pulled: tuple[str, int]) -> None:
        if pulled[1] > self.rule.versions[pulled[0]]:
            self.rule.pulled(*pulled)


def play(rule_of: Any, trace: Trace) -> dict[str, float]:
    """Figures of one rule."""
    names = [f"policy_{number}" for number in range(len(PULL_S))]
    busy = GROUPS_PER_STEP * float(trace.latency_s.mean()) / STEP_S
    slots = -(-int(busy * SPARE) // len(names))
    game = Play(rule_of(names), trace, dict.fromkeys(names, slots))
    game.run()
    warm = NUM_STEPS // 10
    step_s = (game.stepped_s[-1] - game.stepped_s[warm]) / (NUM_STEPS - 1 - warm)
    ideal_s = max(STEP_S, GROUPS_PER_STEP * float(trace.latency_s.mean()) / (slots * len(names)))
    return {"step_s": step_s, "fraction_of_ideal": ideal_s / step_s, **_quality(game)}


def _quality(game: Play) -> dict[str, float]:
    """Ages, waste, and whether slow prompts are trained as often as they are drawn."""
    slow, cost_s = game.trace.slow, game.trace.latency_s
    newest = max(one.prompt for one in game.trained)
    size, kept = len(slow), {one.key for one in game.trained}
    settled = [one for one in game.started if one.prompt < newest - SETTLED]
    drawn, trained = {one.prompt for one in settled}, {one.prompt for one in game.trained}
    spent_s = sum(float(cost_s[one.prompt % size]) for one in settled)
    wasted_s = sum(float(cost_s[one.prompt % size]) for one in settled if one.key not in kept)
    slow_drawn = [prompt for prompt in drawn if slow[prompt % size]]
    return {
        "staleness_max": max(game.ages),
        "staleness_mean": mean(game.ages),
        "wasted_fraction": wasted_s / spent_s,
        "slow_trained_over_drawn": mean(bool(slow[prompt % size]) for prompt in drawn & trained)
        / (len(slow_drawn) / len(drawn)),
        "slow_never_trained_fraction": mean(prompt not in trained for prompt in slow_drawn),
    }


def measure(plan: Plan) -> Report:
    """Play the trace under every rule."""
    trace = Trace.recorded(plan.trace) if plan.trace else Trace.seeded(plan.config.root.seed)
    rules = {
        f"ours/S={MAX_STALENESS}": Ours,
        f"ours/S={MAX_STALENESS}/W={GROUPS_PER_STEP}": lambda names: Ours(names, GROUPS_PER_STEP),
        f"barrier/S={MAX_STALENESS}": Barrier,
        f"discard_and_requeue/S={MAX_STALENESS}": DiscardAndRequeue,
        "unbounded_stream": Stream,
    }
    rows = [{"case": name, **play(rule, trace)} for name, rule in rules.items()]
    return Report(
        bench="rules",
        rows=rows,
        notes=[
            f"{NUM_STEPS} steps of {GROUPS_PER_STEP} groups in simulated time; a step takes {STEP_S:g} s, the replicas "
            f"pull {', '.join(f'{seconds:g}' for seconds in PULL_S)} s after it.",
            "wasted_fraction: share of the generation time whose groups were never trained on (failed tries included).",
            "The ideal is the slower of learner and slots. A group that takes longer than S+1 steps stays within the "
            "bound only if steps grow longer, so that a bounded rule that trains it stays below.",
            "slow_trained_over_drawn: 1 when slow prompts are trained as often as they are drawn.",
        ],
    )


def _group(made: Try) -> Group:
    """A group of one sample of one token, of the version that the try began with."""
    one = np.ones(1, dtype=np.float32)
    samples = Samples(
        lengths=np.ones(1, dtype=np.int32),
        token_ids=np.zeros(1, dtype=np.int32),
        loss_mask=np.ones(1, dtype=bool),
        logprobs=-one,
        advantages=one,
        versions=VersionRuns.uniform(1, PolicyVersion(step=made.version)),
    )
    prompt_id = PromptId(source="trace", epoch=0, index=made.prompt)
    return Group(index=made.key, prompt_id=prompt_id, samples=samples, rewards=one)
