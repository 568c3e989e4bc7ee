"""Procedural tasks of reasoning-gym: prompts by random access, and the verifier that scores their completions.

reasoning-gym is imported when a task is used, not before: importing it takes about 2 s.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from forge_async.core.errors import ConfigError, ForgeError, MissingPackageError
from forge_async.core.records import Prompt, PromptId
from forge_async.core.rng import derive_seed
from forge_async.prompt.ports import Renderer
from forge_async.prompt.split import (
    check_id,
    held_out_id,
    is_demonstration,
    is_demonstration_by_crc,
    is_held_out,
)

if TYPE_CHECKING:
    import numpy as np
    from reasoning_gym.dataset import ProceduralDataset

SCORE = "forge_async.backends.reasoning_gym_task:score"
"""Reference of the verifier, for the reward pool."""
EXACT = "forge_async.backends.reasoning_gym_task:exact"
"""Reference of the exact match, for evaluation."""

Entry = dict[str, Any]
Options = Mapping[str, Any]

VIRTUAL_SIZE = 1 << 31
"""Items of a data set that computes item i when it is asked for; the most that derived seeds can address."""
TABLE_SIZE = 5_000
"""Items of a data set that prepares a table of all of them, which takes it up to 3 s."""
TABULATED = frozenset({"acre", "gsm_symbolic", "list_functions", "word_ladder"})
RENDERED_PROMPTS = 4096
"""Prompts whose token ids are kept, since small data sets are drawn from again and again."""
MAX_DRAWS = 1000
"""Draws for one training prompt before the share of held-out prompts is called too large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltIn:
    """A task with a prompt short enough for the tiny model."""

    data_set: str
    options: Options
    text: Callable[[Entry], str]
    lower: bool = False
    """Whether words and answers are put in lower case."""
    exact_only: bool = False
    """Whether only the exact answer is rewarded, without the data set's partial credit."""
    is_demonstration: Callable[[str, float], bool] = is_demonstration
    """Of a prompt's text and the share: whether it is kept for demonstrations."""


BUILT_INS: dict[str, BuiltIn] = {
    "sum": BuiltIn(
        data_set="chain_sum",
        options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        text=lambda entry: entry["metadata"]["expression"].replace(" ", "") + "=",
    ),
    "spell": BuiltIn(
        data_set="spell_backward",
        options={"min_word_len": 3, "max_word_len": 5},
        text=lambda entry: entry["metadata"]["word"] + ">",
        lower=True,
        exact_only=True,
        is_demonstration=is_demonstration_by_crc,
    ),
}
"""`sum`: `5-9=` is answered by `-4`. `spell`: `klam>` is answered by `malk`."""


class ReasoningGymSource:
    """PromptSource over a reasoning-gym data set, without end: each epoch draws other items.

    Item `index` of an epoch is the first of a row of draws, seeded by (seed, epoch, index, draw), whose text is not
    held out, so that any prompt can be had without the ones before it. Held-out prompts do not depend on the run's
    seed, so that runs are measured on the same ones.

    Args:
        task: `sum`, `spell`, or the name of a reasoning-gym data set, whose question becomes the prompt.
        renderer: makes the tokens.
        options: of the data set; they go over those of a built-in task.
        seed: the run's seed.
        num_prompts: prompts of one epoch.
        held_out_fraction: share of texts kept for evaluation.
        demonstration_fraction: share of the other texts kept for demonstrations.
        demonstrations: give those prompts instead of the training prompts.
        system: system message of a chat; "" for none.

    A prompt's data holds `answer` (for reward functions of the user's own), and `data_set`, `options` and `entry`,
    which `score` needs; all plain JSON. Raises ConfigError for an unknown data set or option, MissingPackageError
    without reasoning-gym.
    """

    def __init__(
        self,
        task: str,
        renderer: Renderer,
        *,
        options: Options | None = None,
        seed: int = 0,
        num_prompts: int = 10_000,
        held_out_fraction: float = 0.2,
        demonstration_fraction: float = 0.0,
        demonstrations: bool = False,
        system: str = "",
    ) -> None:
        built_in = BUILT_INS.get(task) or BuiltIn(data_set=task, options={}, text=lambda entry: entry["question"])
        self.name = task
        self._renderer, self._seed, self._system = renderer, seed, system
        self._num_prompts, self._held_out_fraction = num_prompts, held_out_fraction
        self._demonstration_fraction = demonstration_fraction
        self._demonstrations = demonstrations and demonstration_fraction > 0
        self._is_demonstration = built_in.is_demonstration
        self._data_set, self._text, self._lower = built_in.data_set, built_in.text, built_in.lower
        self.reward = EXACT if built_in.exact_only else SCORE
        """Reference of the function that rewards completions of this task."""
        self._options = {**built_in.options, **(options or {})}
        self._items = create_data_set(self._data_set, self._options)
        self._token_ids = lru_cache(maxsize=RENDERED_PROMPTS)(self._rendered)
        self._check_plain()

    def __len__(self) -> int:
        return self._num_prompts

    def prompt(self, id: PromptId) -> Prompt:
        """See PromptSource."""
        check_id(id, self.name, len(self))
        for draw in range(MAX_DRAWS):
            entry = self._entry(derive_seed(self._seed, "prompt", self.name, id.epoch, id.index, draw))
            if self._suits(entry):
                return self._render(entry, id)
        raise ForgeError(
            f"Task {self.name} gave no prompt outside the held-out ones in {MAX_DRAWS} draws: "
            f"lower task.held_out_fraction={self._held_out_fraction:g}."
        )

    def held_out(self, num_prompts: int) -> list[Prompt]:
        """See PromptSource; fewer than asked for where the data set has no more (`sum` has 47 at a share of 0.2)."""
        found: dict[str, Entry] = {}
        draw, last_new = 0, 0
        while len(found) < num_prompts and self._held_out_fraction > 0 and draw - last_new < MAX_DRAWS:
            entry = self._entry(derive_seed(0, "held out", self.name, draw))
            if self._is_held_out(entry) and self._text(entry) not in found:
                found[self._text(entry)], last_new = entry, draw
            draw += 1
        return [self._render(entry, held_out_id(self.name, index)) for index, entry in enumerate(found.values())]

    def _entry(self, seed: int) -> Entry:
        entry = self._items[seed % len(self._items)]
        return _lower(entry) if self._lower else entry

    def _is_held_out(self, entry: Entry) -> bool:
        return is_held_out(self._text(entry), self._held_out_fraction)

    def _suits(self, entry: Entry) -> bool:
        """Whether the entry belongs to the part of the task that this source gives."""
        kept = self._is_demonstration(self._text(entry), self._demonstration_fraction)
        return not self._is_held_out(entry) and kept == self._demonstrations

    def _render(self, entry: Entry, id: PromptId) -> Prompt:
        entry, text = _plain(entry), self._text(entry)
        data = {"answer": entry["answer"], "data_set": self._data_set, "options": self._options, "entry": entry}
        return Prompt(id=id, token_ids=self._token_ids(text), text=text, data=data)

    def _rendered(self, text: str) -> np.ndarray:
        """The prompt's token ids, shared by all who draw it, and therefore read-only."""
        token_ids = self._renderer.render(text, self._system)
        token_ids.flags.writeable = False
        return token_ids

    def _check_plain(self) -> None:
        """Refuse a data set whose verifier needs more of an entry than JSON can carry."""
        entry = self._entry(derive_seed(self._seed, "check", self.name))
        score = self._items.score_answer
        if entry["answer"] is not None and score(entry["answer"], entry) != score(entry["answer"], _plain(entry)):
            raise ConfigError(f"task.name={self.name} cannot be used: its verifier needs what JSON cannot carry.")


def score(completion: str, data_set: str, options: Options, entry: Entry, truncated: bool = False) -> float:
    """The data set's own score of a completion, in [0, 1], often with partial credit; 0 where it was cut short.

    Of a completion with <answer> tags, what stands in the last ones is scored (reasoning-gym's convention).
    """
    if truncated:
        return 0.0
    verifier = _verifier(data_set, json.dumps(options, sort_keys=True))
    try:
        return float(verifier.score_answer(answer_of(completion), entry))
    except Exception:  # noqa: BLE001  some verifiers raise on an answer that they cannot read: it is wrong
        return 0.0


def exact(completion: str, entry: Entry, truncated: bool = False) -> float:
    """1 where the answer is the reference answer to the letter and the completion ended by itself, else 0."""
    return float(not truncated and answer_of(completion) == entry["answer"])


def answer_of(completion: str) -> str:
    """What stands in the last <answer> tags, without space around it, or else the whole completion as it is."""
    tagged = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    return tagged[-1].strip() if tagged else completion


@lru_cache(maxsize=16)
def _verifier(data_set: str, options: str) -> ProceduralDataset:
    return create_data_set(data_set, json.loads(options))


def create_data_set(name: str, options: Options) -> ProceduralDataset:
    """The data set with seed 0: its item i depends on seed + i only, so that distant i stand for distant seeds.

    Raises ConfigError for an unknown name or option, naming the nearest known one, and for an unsuited value;
    MissingPackageError when reasoning-gym cannot be imported.
    """
    registry = _registry()
    if name not in registry:
        near = _near(name, [*BUILT_INS, *registry])
        raise ConfigError(f"task.name={name} is neither a built-in task nor a reasoning-gym data set; {near}.")
    fields = registry[name][1].__dataclass_fields__.keys() - {"seed", "size"}
    for option in options:
        if option not in fields:
            raise ConfigError(f"task.options: {name} has no option {option}; {_near(option, sorted(fields))}.")
    size = TABLE_SIZE if name in TABULATED else VIRTUAL_SIZE
    try:
        import reasoning_gym

        return reasoning_gym.create_dataset(name, seed=0, size=size, **options)
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"task.options={dict(options)} do not suit {name}: {error or 'see its options'}.") from error


def _registry() -> dict[str, Any]:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise MissingPackageError(
            f"The built-in tasks need reasoning-gym ({error}): run `make setup`, "
            "or `pip install reasoning-gym==0.1.25 matplotlib drawsvg`."
        ) from error
    return DATASETS


def _near(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    shown = ", ".join(known[:12]) + (" and others" if len(known) > 12 else "")
    return f"did you mean {near[0]}" if near else f"there are {shown}"


def _lower(entry: Entry) -> Entry:
    """The entry of a spelling task in lower case."""
    word = entry["metadata"]["word"].lower()
    return {**entry, "answer": entry["answer"].lower(), "metadata": {**entry["metadata"], "word": word}}


def _plain(entry: Entry) -> Entry:
    """The entry as JSON would give it back."""
    return json.loads(json.dumps(entry, default=str))
