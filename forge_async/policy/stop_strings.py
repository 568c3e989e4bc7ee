"""Stop strings: the text of a completion is looked at after each token, since no token need stand for the string."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

TOKENS_A_CHARACTER = 4
"""At most, in UTF-8 by single bytes. Tokens without text of their own are rare."""


class StopWatcher:
    """One completion in the making."""

    def __init__(
        self, decode: Callable[[list[int]], str], stop_strings: Sequence[str], given: Sequence[int] = ()
    ) -> None:
        """Watch for the strings.

        Args:
            decode: token ids to text.
            stop_strings: none of them empty.
            given: the completion's tokens so far; a string may begin in them.
        """
        self._decode, self._stop_strings = decode, tuple(stop_strings)
        # Only the end is decoded: what lay wholly before it was found when its last token came.
        self._end = deque(given, maxlen=TOKENS_A_CHARACTER * (max(map(len, stop_strings)) + 1))

    def completed_by(self, token_ids: Sequence[int]) -> str | None:
        """The string that the next tokens complete, if any."""
        self._end.extend(token_ids)
        text = self._decode(list(self._end))
        return next((each for each in self._stop_strings if each in text), None)
