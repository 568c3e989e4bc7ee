"""The renderer over Hugging Face tokenizers, on the character tokenizer of the tiny model."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_async.core.errors import ConfigError

pytest.importorskip("transformers", reason="transformers is not installed")

from forge_async.backends.hf_renderer import (
    BOS_ID,
    CHARACTERS,
    EOS_ID,
    PAD_ID,
    SPECIAL,
    HfRenderer,
    _encoder_of,
    write_char_tokenizer,
)

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_char_tokenizer(path)
    (path / "config.json").write_text(json.dumps({"vocab_size": 98}))
    return path


@pytest.fixture(scope="module")
def renderer(folder):
    return HfRenderer(folder)


@pytest.fixture
def chat_folder(tmp_path):
    write_char_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


@given(st.text(alphabet=CHARACTERS))
def test_every_printable_text_survives_encoding(renderer, text):
    assert renderer.decode(renderer.encode(text)) == text
    assert renderer.decode(renderer.render(text)) == text


@given(st.text(alphabet=CHARACTERS) | st.lists(st.sampled_from(["<eos>", "<pad>", "[UNK]", " a"])).map("".join))
def test_token_ids_are_those_that_transformers_gives(renderer, text):
    assert renderer._encoder is not None
    assert renderer.encode(text).tolist() == renderer._tokenizer(text, add_special_tokens=False).input_ids
    assert renderer.render(text).tolist() == renderer._tokenizer(text).input_ids


def test_padding_and_truncation_of_the_tokenizers_file_are_not_for_prompts(tmp_path):
    write_char_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    padding = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": PAD_ID,
        "pad_type_id": 0,
        "pad_token": SPECIAL[PAD_ID],
    }
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"padding": padding, "truncation": truncation}))
    assert len(HfRenderer(tmp_path).encode("abcd")) == 4


@pytest.mark.parametrize("name", ["__call__", "_encode_plus"])
def test_a_tokenizer_with_a_way_of_its_own_encodes_in_that_way(renderer, name):
    kind = type(renderer._tokenizer)
    assert _encoder_of(renderer._tokenizer) is not None
    own = type("Own", (kind,), {name: lambda self, *args, **kwargs: None})
    assert _encoder_of(own.__new__(own)) is None


@pytest.mark.parametrize("text", ["  a   b  ", " ", "n't , . !", "<eos><pad></s>", "[UNK]"])
def test_spaces_and_what_looks_like_special_tokens_survive(renderer, text):
    assert renderer.decode(renderer.encode(text)) == text
    assert len(renderer.encode(text)) == len(text)


def test_token_ids_are_those_of_the_recipe(renderer):
    assert renderer.render("5-9=").tolist() == [BOS_ID, *(ord(c) - 32 + 3 for c in "5-9=")]
    assert renderer.encode(CHARACTERS).tolist() == list(range(3, 98))
    assert renderer.render("5").dtype == np.int32
    assert (PAD_ID, BOS_ID, EOS_ID) == (0, 1, 2)
    assert (renderer.pad_token_id, renderer.stop_token_ids, renderer.vocab_size) == (0, (2,), 98)


@given(st.lists(st.lists(st.integers(0, 97), max_size=12), max_size=5), st.booleans())
def test_many_rows_are_decoded_as_each_is_alone(renderer, rows, is_fast):
    in_python = HfRenderer.__new__(HfRenderer)
    in_python._tokenizer = SimpleNamespace(decode=renderer._tokenizer.decode)
    assert (renderer if is_fast else in_python).decode_many(rows) == [renderer.decode(row) for row in rows]


def test_special_tokens_are_left_out_of_decoded_text(renderer):
    assert renderer.decode([BOS_ID, 3 + ord("7") - 32, EOS_ID, PAD_ID]) == "7"
    assert renderer.decode([]) == ""


def test_padding_that_is_the_end_token_is_no_end_of_its_own(tmp_path):
    path = _written(tmp_path) / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": SPECIAL[EOS_ID]}))
    renderer = HfRenderer(tmp_path)
    assert renderer.pad_token_id == EOS_ID and renderer.stop_token_ids == (EOS_ID,)
    assert renderer.decode([3 + ord("7") - 32, EOS_ID]) == "7"


def test_a_text_that_the_tokenizer_cannot_express_is_refused(renderer):
    with pytest.raises(ConfigError, match=r"cannot express a prompt, such as '\\n', 'é'"):
        renderer.render("é\n1")


def test_a_system_message_stands_before_the_text_where_there_is_no_chat(tmp_path):
    with pytest.raises(ConfigError, match="cannot express"):  # the line between is not printable
        HfRenderer(_written(tmp_path)).render("1", "Think.")


def test_a_chat_template_is_used_when_there_is_one(chat_folder):
    renderer = HfRenderer(chat_folder)
    assert renderer.uses_chat
    assert renderer.decode(renderer.render("1+1=", "Be brief.")) == "[system]Be brief.[user]1+1=[a]"
    assert renderer.decode(renderer.render_messages([{"role": "user", "content": "x"}])) == "[user]x[a]"
    assert BOS_ID not in renderer.render("1+1=")  # the template writes its own, if any


def test_chat_off_renders_plain_text_but_still_renders_chats(chat_folder):
    renderer = HfRenderer(chat_folder, chat="off")
    assert renderer.decode(renderer.render("1+1=")) == "1+1="
    assert renderer.decode(renderer.render_messages([{"role": "user", "content": "x"}])) == "[user]x[a]"


def test_chats_without_a_template_are_refused(folder, renderer):
    with pytest.raises(ConfigError, match="has no chat template; set task.chat=off"):
        HfRenderer(folder, chat="on")
    with pytest.raises(ConfigError, match='give "prompt", not "messages"'):
        renderer.render_messages([{"role": "user", "content": "x"}])


def test_a_template_that_refuses_its_messages_is_named(tmp_path):
    (_written(tmp_path) / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    with pytest.raises(ConfigError, match="refuses the messages: no system role"):
        HfRenderer(tmp_path).render("x")


@pytest.mark.parametrize(("eos", "expected"), [([2, 7], (2, 7)), (5, (2, 5)), (None, (2,))])
def test_stop_tokens_of_the_generation_config_are_added(tmp_path, eos, expected):
    (_written(tmp_path) / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert HfRenderer(tmp_path).stop_token_ids == expected


def test_a_tokenizer_that_is_larger_than_the_model_is_refused(tmp_path):
    (_written(tmp_path) / "config.json").write_text(json.dumps({"vocab_size": 64}))
    with pytest.raises(ConfigError, match="has 98 tokens but the model's vocab_size is 64"):
        HfRenderer(tmp_path)


def test_a_model_larger_than_its_tokenizer_is_usual(tmp_path):
    (_written(tmp_path) / "config.json").write_text(json.dumps({"vocab_size": 128}))
    assert HfRenderer(tmp_path).vocab_size == 98


def test_a_folder_that_is_missing_or_holds_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not a folder"):
        HfRenderer(tmp_path / "none")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ConfigError, match="has no readable tokenizer"):
        HfRenderer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        HfRenderer(tmp_path)


def _written(path):
    write_char_tokenizer(path)
    return path
