"""Prompt sources that need nothing but a file."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from forge_async.core.errors import ConfigError
from forge_async.core.records import Prompt, PromptId
from forge_async.core.rng import stream
from forge_async.prompt.jsonl import Row, read_jsonl
from forge_async.prompt.ports import Renderer
from forge_async.prompt.split import check_id, held_out_id, is_held_out


class JsonlSource:
    """PromptSource over a .jsonl file; each epoch goes through its training prompts in another order.

    Args:
        path: each line an object with `prompt` (a string) or `messages` (a chat); further fields become the data that
            reward functions get.
        renderer: makes the tokens.
        seed: the run's seed; the order of an epoch derives from it and the epoch.
        held_out_fraction: share of the lines kept for evaluation, by a hash of the prompt's text.
        system: system message of prompts that are not chats themselves; "" for none.
        name: of the source; "" takes the file's.
        demonstrations: lines may have a `completion`, to be learned from.

    Raises ConfigError naming the line of the file that cannot be used. Texts are rendered when they are asked for,
    the first one at once, so that a tokenizer that does not suit the file is noticed at the start.
    """

    def __init__(
        self,
        path: str | Path,
        renderer: Renderer,
        *,
        seed: int = 0,
        held_out_fraction: float = 0.0,
        system: str = "",
        name: str = "",
        demonstrations: bool = False,
    ) -> None:
        self.name = name or Path(path).stem
        self._path, self._renderer, self._seed, self._system = Path(path), renderer, seed, system
        rows = read_jsonl(path, demonstrations=demonstrations)
        kept = [is_held_out(row.text, held_out_fraction) for row in rows]
        self._train = [row for row, out in zip(rows, kept, strict=True) if not out]
        self._held_out = [row for row, out in zip(rows, kept, strict=True) if out]
        if not self._train:
            raise ConfigError(
                f"prompts={path}: all {len(rows)} prompts are held out for evaluation; "
                f"lower task.held_out_fraction={held_out_fraction:g} or give more prompts."
            )
        self._order = lru_cache(maxsize=4)(self._permutation)
        self._render(self._train[0], PromptId(source=self.name, epoch=0, index=0))

    def __len__(self) -> int:
        return len(self._train)

    def prompt(self, id: PromptId) -> Prompt:
        """See PromptSource."""
        check_id(id, self.name, len(self))
        return self._render(self._train[self._order(id.epoch)[id.index]], id)

    def held_out(self, num_prompts: int) -> list[Prompt]:
        """The first `num_prompts` held-out prompts of the file, without repeated texts."""
        distinct: dict[str, Row] = {}
        for row in self._held_out:
            distinct.setdefault(row.text, row)
        rows = list(distinct.values())[:num_prompts]
        return [self._render(row, held_out_id(self.name, index)) for index, row in enumerate(rows)]

    def _permutation(self, epoch: int) -> np.ndarray:
        return stream(self._seed, "prompt order", self.name, epoch).permutation(len(self._train))

    def _render(self, row: Row, id: PromptId) -> Prompt:
        try:
            if row.messages is None:
                token_ids = self._renderer.render(row.text, self._system)
            else:
                token_ids = self._renderer.render_messages(row.messages)
        except ConfigError as error:
            raise ConfigError(f"{self._path}:{row.line}: {error}") from error
        return Prompt(id=id, token_ids=token_ids, text=row.text, data=row.data)
