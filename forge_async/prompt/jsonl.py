"""Prompts in a .jsonl file: read and checked as a whole, with the line named where something is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_async.core.errors import ConfigError
from forge_async.prompt.ports import Message

EXPECTED = 'expected an object such as {"prompt": "1+1=", "answer": "2"}, or with "messages" in place of "prompt"'
RESERVED = {"completion": "the policy's answer", "truncated": "whether that answer was cut short"}
"""Names under which a reward function gets something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the file."""

    line: int
    """From 1."""
    text: str
    """The prompt for people and reward functions; of a chat, its only user message, or all as `role: content` lines."""
    messages: tuple[Message, ...] | None
    """The chat, where the line has one."""
    data: Mapping[str, Any]
    """All further fields."""


def read_jsonl(path: str | Path, *, demonstrations: bool = False) -> list[Row]:
    """Read a file of prompts; blank lines are skipped.

    With `demonstrations` a line may say what to answer, in a field `completion`: no reward function will get it.

    Raises ConfigError naming file and line, what is wrong there, and what was expected.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # not splitlines: U+2028 may stand in a string
    except OSError as error:
        raise ConfigError(f"prompts={path} cannot be read: {error.strerror}; give a .jsonl file.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompts={path} is not UTF-8 text (byte {error.start}); save it as UTF-8.") from error
    reserved = {} if demonstrations else RESERVED
    rows = [_parse(text, f"{path}:{number}", number, reserved) for number, text in enumerate(lines, 1) if text.strip()]
    if not rows:
        raise ConfigError(f"prompts={path} is empty: {EXPECTED}, one a line.")
    return rows


def _parse(text: str, where: str, line: int, reserved: Mapping[str, str]) -> Row:
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON ({error.msg} at column {error.colno}); {EXPECTED}.") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: {_type(fields)} instead of an object; {EXPECTED}.")
    for name, meaning in reserved.items():
        if name in fields:
            raise ConfigError(f'{where}: field "{name}" is what reward functions get {meaning} in; rename the field.')
    messages = _messages(fields, where)
    text = _text(fields, where) if messages is None else _chat_text(messages)
    data = {key: value for key, value in fields.items() if key not in ("prompt", "messages")}
    return Row(line=line, text=text, messages=messages, data=data)


def _text(fields: dict[str, Any], where: str) -> str:
    if "prompt" not in fields:
        names = ", ".join(fields) or "no fields"
        raise ConfigError(f'{where}: neither "prompt" nor "messages" among its fields ({names}); {EXPECTED}.')
    text = fields["prompt"]
    if not isinstance(text, str) or not text:
        raise ConfigError(f'{where}: "prompt" is {_type(text)} instead of a string that is not empty.')
    return text


def _messages(fields: dict[str, Any], where: str) -> tuple[Message, ...] | None:
    if "messages" not in fields:
        return None
    if "prompt" in fields:
        raise ConfigError(f'{where}: both "prompt" and "messages"; keep one of them.')
    messages = fields["messages"]
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ConfigError(f'{where}: "messages" must be a list such as [{{"role": "user", "content": "1+1="}}].')
    if messages[-1]["role"] == "assistant":
        raise ConfigError(f"{where}: the last message is the assistant's, but that is what the policy shall write.")
    return tuple(messages)


def _chat_text(messages: tuple[Message, ...]) -> str:
    spoken = [message for message in messages if message["role"] != "system"]
    if len(spoken) == 1:
        return spoken[0]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _type(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "an empty string" if value == "" else "a string",
        bool: "a boolean",
    }
    return "null" if value is None else names.get(type(value), "a number")
