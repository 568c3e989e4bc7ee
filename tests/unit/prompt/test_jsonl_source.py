"""Prompts of a file: what is accepted, and what is said about a line that is not."""

import json

import numpy as np
import pytest

from forge_async.core.errors import ConfigError
from forge_async.core.records import PromptId
from forge_async.prompt.jsonl import read_jsonl
from forge_async.prompt.sources import JsonlSource
from forge_async.prompt.split import is_held_out


class Recorder:
    """A Renderer that keeps what it was asked to render, and refuses some."""

    def __init__(self, refuses=""):
        self.seen, self._refuses = [], refuses

    def render(self, text, system=""):
        if self._refuses and self._refuses in text:
            raise ConfigError(f"cannot express {self._refuses}")
        self.seen.append((system, text))
        return np.zeros(1, dtype=np.int32)

    def render_messages(self, messages):
        self.seen.append(messages)
        return np.zeros(1, dtype=np.int32)


def write(folder, *lines):
    path = folder / "data.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def ids(source, epoch=0):
    return [PromptId(source=source.name, epoch=epoch, index=i) for i in range(len(source))]


def test_an_epoch_gives_every_line_once(tmp_path):
    path = write(tmp_path, *({"prompt": f"p{n}", "n": n} for n in range(100)))
    source = JsonlSource(path, Recorder())
    for epoch in range(3):
        assert sorted(source.prompt(id).data["n"] for id in ids(source, epoch)) == list(range(100))


def test_further_fields_become_data_and_the_name_is_the_files(tmp_path):
    path = write(tmp_path, {"prompt": "1+1=", "answer": "2", "tags": ["a", None]})
    source = JsonlSource(path, Recorder())
    assert source.name == "data"
    assert source.prompt(ids(source)[0]).data == {"answer": "2", "tags": ["a", None]}


def test_blank_lines_a_byte_order_mark_and_line_separators_in_strings_do_no_harm(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('\ufeff{"prompt": "a\u2028b"}\r\n\n  \n{"prompt": "c"}\n', encoding="utf-8")
    assert [(row.line, row.text) for row in read_jsonl(path)] == [(1, "a\u2028b"), (4, "c")]


def test_the_system_message_goes_to_prompts_and_chats_stay_as_they_are(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1=?"}]
    renderer = Recorder()
    source = JsonlSource(write(tmp_path, {"messages": chat}), renderer, system="Think.")
    assert source.prompt(ids(source)[0]).text == "1+1=?"
    assert list(renderer.seen[-1]) == chat
    renderer = Recorder()
    JsonlSource(write(tmp_path, {"prompt": "1+1="}), renderer, system="Think.")
    assert renderer.seen == [("Think.", "1+1=")]


def test_the_text_of_a_longer_chat_is_all_that_was_said(tmp_path):
    chat = [("user", "Hi"), ("assistant", "Hello"), ("user", "1+1=?")]
    path = write(tmp_path, {"messages": [{"role": role, "content": content} for role, content in chat]})
    assert read_jsonl(path)[0].text == "user: Hi\nassistant: Hello\nuser: 1+1=?"


def test_growing_the_file_moves_no_prompt_across_the_split(tmp_path):
    rows = [{"prompt": f"question {n}"} for n in range(200)]

    def held_out(count):
        source = JsonlSource(write(tmp_path, *rows[:count]), Recorder(), held_out_fraction=0.2)
        return {prompt.text for prompt in source.held_out(1000)}

    assert held_out(100) <= held_out(200)
    assert 20 < len(held_out(200)) < 60


def test_a_text_that_stands_twice_is_held_out_once(tmp_path):
    path = write(tmp_path, *[{"prompt": f"q{n % 50}"} for n in range(100)])
    texts = [prompt.text for prompt in JsonlSource(path, Recorder(), held_out_fraction=0.5).held_out(1000)]
    assert 0 < len(texts) == len(set(texts))


def test_a_text_that_the_tokenizer_refuses_is_named_with_its_line_at_the_start(tmp_path):
    path = write(tmp_path, {"prompt": "é"})
    with pytest.raises(ConfigError, match=r"data\.jsonl:1: cannot express é"):
        JsonlSource(path, Recorder(refuses="é"))


def test_a_file_that_is_held_out_as_a_whole_is_refused(tmp_path):
    text = next(f"q{n}" for n in range(100) if is_held_out(f"q{n}", 0.5))
    with pytest.raises(ConfigError, match="all 1 prompts are held out .* lower task.held_out_fraction=0.5"):
        JsonlSource(write(tmp_path, {"prompt": text}), Recorder(), held_out_fraction=0.5)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', r"data\.jsonl:2: not JSON .* at column"),
        ('["a"]', "data.jsonl:2: a list instead of an object; expected an object such as"),
        ("3", "data.jsonl:2: a number instead of an object"),
        ({"question": "a", "answer": "b"}, r'neither "prompt" nor "messages" among its fields \(question, answer\)'),
        ({"prompt": 3}, '"prompt" is a number instead of a string'),
        ({"prompt": ""}, '"prompt" is an empty string instead of'),
        ({"prompt": None}, '"prompt" is null'),
        ({"prompt": True}, '"prompt" is a boolean'),
        ({"prompt": "a", "messages": []}, 'both "prompt" and "messages"'),
        ({"messages": []}, '"messages" must be a list such as'),
        ({"messages": ["hi"]}, '"messages" must be a list such as'),
        ({"messages": [{"role": "user"}]}, '"messages" must be a list such as'),
        ({"messages": [{"role": "assistant", "content": "2"}]}, "the last message is the assistant's"),
        ({"prompt": "a", "completion": "b"}, 'field "completion" is what reward functions get the policy\'s answer in'),
        ({"prompt": "a", "truncated": True}, 'field "truncated"'),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong_and_what_was_expected(tmp_path, line, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read_jsonl(write(tmp_path, {"prompt": "good"}, line))
    assert "data.jsonl:2" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"prompts=.*none\.jsonl cannot be read: No such file"):
        read_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_jsonl(tmp_path)
    with pytest.raises(ConfigError, match="is empty"):
        read_jsonl(write(tmp_path, "", " "))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read_jsonl(tmp_path / "latin.jsonl")


def test_a_demonstration_may_say_what_to_answer(tmp_path):
    path = tmp_path / "demonstrations.jsonl"
    path.write_text('{"prompt": "1+1=", "completion": "2"}\n')
    source = JsonlSource(path, Recorder(), demonstrations=True)
    prompt = source.prompt(PromptId(source="demonstrations", epoch=0, index=0))
    assert prompt.data == {"completion": "2"}
    with pytest.raises(ConfigError, match='"completion" is what reward functions get'):
        JsonlSource(path, Recorder())
