"""Renderer over a Hugging Face tokenizer, and the character tokenizer of the tiny model."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_async.core.errors import ConfigError, MissingPackageError
from forge_async.prompt.ports import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
SPECIAL = ("\u2400", "\u2402", "\u2403")
"""Padding, start and end of the character tokenizer: symbols that no printable ASCII text can contain."""
CHARACTERS = "".join(map(chr, range(32, 127)))
"""What the character tokenizer can express; character i has token id i + 3."""
GENERIC_CLASSES = {"TokenizersBackend", "PreTrainedTokenizerFast"}
"""Tokenizer classes that are whole in tokenizer.json; loading them directly spares AutoTokenizer's import of torch."""
PLAIN_MODULES = ["transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers"]
"""Where transformers itself defines how a fast tokenizer encodes; a class of a model's own may do more."""


class HfRenderer:
    """Renderer of a model.

    Args:
        model: folder, or name on the Hugging Face hub, fetched unless the local cache has it or HF_HUB_OFFLINE forbids.
        chat: "auto": use the model's chat template when it has one; "on": require it; "off": plain text, with what the
            tokenizer adds by itself (such as a start token).

    Raises ConfigError when there is no usable tokenizer, when it has more tokens than the model (`vocab_size` in
    config.json), when no token ends a completion, or when chat="on" and there is no template.
    """

    def __init__(self, model: str | Path, *, chat: str = "auto") -> None:
        self._model = str(model)
        self._folder = _find_folder(self._model)
        self._tokenizer: Any = _load_tokenizer(self._model, self._folder)
        self._encoder = _encoder_of(self._tokenizer)
        self._vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self._check_vocabulary()
        self._stop_token_ids = self._find_stop_tokens()
        has_template = bool(self._tokenizer.chat_template)
        if chat == "on" and not has_template:
            raise ConfigError(f"task.chat=on, but the tokenizer of {model} has no chat template; set task.chat=off.")
        self._has_template, self._chat = has_template, has_template and chat != "off"

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's end token and those of the model's generation_config.json, ascending."""
        return self._stop_token_ids

    @property
    def pad_token_id(self) -> int:
        """The tokenizer's padding token, or a stop token where it has none."""
        pad = self._tokenizer.pad_token_id
        return self._stop_token_ids[0] if pad is None else int(pad)

    @property
    def vocab_size(self) -> int:
        """One more than the greatest token id."""
        return self._vocab_size

    @property
    def uses_chat(self) -> bool:
        """Whether plain prompts are rendered as chats."""
        return self._chat

    def render(self, text: str, system: str = "") -> np.ndarray:
        """See Renderer. Without a chat, a system message stands before the text, with a line between."""
        if self._chat:
            messages = [{"role": "system", "content": system}] if system else []
            return self.render_messages([*messages, {"role": "user", "content": text}])
        return self._encode(f"{system}\n\n{text}" if system else text, special=True)

    def render_messages(self, messages: Sequence[Message]) -> np.ndarray:
        """See Renderer."""
        if not self._has_template:
            raise ConfigError(f'the tokenizer of {self._model} has no chat template: give "prompt", not "messages".')
        try:
            chat = [dict(message) for message in messages]
            text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # noqa: BLE001  templates are programs and raise what they like
            raise ConfigError(f"the chat template of {self._model} refuses the messages: {error}") from error
        return self._encode(str(text), special=False)

    def encode(self, text: str) -> np.ndarray:
        """See Renderer."""
        return self._encode(text, special=False)

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """See Renderer."""
        ids = np.asarray(token_ids, dtype=np.int64).tolist()
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def decode_many(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """See Renderer. A call for each row would cost as much again as all of a batch's other work on it."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:  # a tokenizer in Python
            return [self.decode(row) for row in rows]
        return backend.decode_batch([list(row) for row in rows], skip_special_tokens=True)

    def _encode(self, text: str, *, special: bool) -> np.ndarray:
        try:
            if self._encoder is None:
                ids = self._tokenizer(text, add_special_tokens=special).input_ids
            else:
                ids = self._encoder.encode(text, add_special_tokens=special).ids
        except Exception as error:  # noqa: BLE001  the tokenizers library raises plain Exception
            unknown = sorted(set(text) - self._tokenizer.get_vocab().keys())[:5]
            what = f", such as {', '.join(map(repr, unknown))}" if unknown else ""
            raise ConfigError(f"the tokenizer of {self._model} cannot express a prompt{what} ({error}).") from error
        return np.asarray(ids, dtype=np.int32)

    def _check_vocabulary(self) -> None:
        config = _read_json(self._folder / "config.json")
        size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
        if size is not None and self._vocab_size > size:
            raise ConfigError(
                f"the tokenizer of {self._model} has {self._vocab_size} tokens but the model's vocab_size is {size}: "
                "they do not belong together; give the model the tokenizer that it was trained with."
            )

    def _find_stop_tokens(self) -> tuple[int, ...]:
        more = _read_json(self._folder / "generation_config.json").get("eos_token_id")
        ids = {self._tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])} - {None}
        if not ids:
            raise ConfigError(f"{self._model} has no end token in its tokenizer or generation_config.json; set one.")
        return tuple(sorted(map(int, ids)))


def write_char_tokenizer(folder: str | Path) -> None:
    """Write the character tokenizer of the tiny model: 0 padding, 1 start, 2 end, then chr(32) to chr(126) as 3 to 97.

    It puts the start token before a text, takes every printable ASCII string apart without loss, and refuses others.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    pad, start, end = SPECIAL
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single=f"{start} $A", pair=f"{start} $A $B", special_tokens=[(start, BOS_ID)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=start,
        eos_token=end,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    ).save_pretrained(str(folder))


def _load_tokenizer(model: str, folder: Path) -> PreTrainedTokenizerBase:
    try:
        if _read_json(folder / "tokenizer_config.json").get("tokenizer_class") in GENERIC_CLASSES:
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(str(folder))
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(folder))
    except ImportError as error:
        raise _missing(error) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"model.path={model} has no readable tokenizer: {_brief(error)}") from error


def _encoder_of(tokenizer: Any) -> Any:
    """What encodes text underneath a tokenizer that adds nothing of its own, at a quarter of the time; else None."""
    kind, encoder = type(tokenizer), getattr(tokenizer, "backend_tokenizer", None)
    ways = [getattr(kind, name, None) for name in ("__call__", "_encode_plus")]
    if encoder is None or [getattr(way, "__module__", "") for way in ways] != PLAIN_MODULES:
        return None
    tokenizer("", add_special_tokens=False)  # sets it to neither pad nor truncate, whatever its file says
    return encoder


def _find_folder(model: str) -> Path:
    """The folder itself, or the local copy of a hub name's small files, fetched if need be."""
    if Path(model).is_dir():
        return Path(model)
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", model):
        raise ConfigError(f"model.path={model} is not a folder; give one, or the name of a model on the hub.")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, allow_patterns=["*.json", "*.model", "*.txt", "*.jinja"]))
    except ImportError as error:
        raise _missing(error) from error
    except Exception as error:  # noqa: BLE001  network, permission, name: all mean that there is no such model
        cause = _brief(error)
        raise ConfigError(f"model.path={model} is not a folder here, and the hub does not give it: {cause}") from error


def _missing(error: ImportError) -> MissingPackageError:
    how = "run `make setup`, or `pip install transformers==5.19.0`"
    return MissingPackageError(f"Reading a tokenizer needs transformers ({error}): {how}.")


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from error
