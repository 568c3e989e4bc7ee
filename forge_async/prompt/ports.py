"""Where prompts come from, and what turns their text into tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from forge_async.core.records import Prompt, PromptId

Message = Mapping[str, str]
"""One message of a chat: `role` and `content`."""


class Renderer(Protocol):
    """Text to token ids and back, as the model was trained to read it."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a completion."""
        ...

    @property
    def pad_token_id(self) -> int:
        """A token that fills batches; never trained on."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the tokenizer can give."""
        ...

    def render(self, text: str, system: str = "") -> np.ndarray:
        """int32 [T], the prompt of one user text; `system` is the chat's system message, "" for none.

        Raises ConfigError when the tokenizer cannot express the text.
        """
        ...

    def render_messages(self, messages: Sequence[Message]) -> np.ndarray:
        """int32 [T], the prompt of a chat, ready for the assistant's answer.

        Raises ConfigError when the model has no chat template.
        """
        ...

    def encode(self, text: str) -> np.ndarray:
        """int32 [T], the tokens of the text alone, such as a demonstration's answer."""
        ...

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """The text of token ids, without special tokens."""
        ...

    def decode_many(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The text of each row of token ids, as `decode` gives it, in one call."""
        ...


class PromptSource(Protocol):
    """Prompts by random access. The cursor over them is the replay ledger's, so a source has no state to save."""

    @property
    def name(self) -> str:
        """What its prompts' ids carry as `source`."""
        ...

    def __len__(self) -> int:
        """Prompts of one epoch."""
        ...

    def prompt(self, id: PromptId) -> Prompt:
        """The prompt at `id`: the same in every process for the same seed, and never one that is held out.

        Raises ForgeError when the id is of another source or outside the epoch.
        """
        ...

    def held_out(self, num_prompts: int) -> list[Prompt]:
        """At most `num_prompts` distinct prompts for evaluation, the same each time; `prompt` gives none of them."""
        ...
