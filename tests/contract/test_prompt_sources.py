"""The contract of prompt sources, for the fake, the file and the procedural task."""

import json

import numpy as np
import pytest

from forge_async.core.errors import ForgeError
from forge_async.core.records import Prompt, PromptId
from forge_async.prompt.sources import JsonlSource
from forge_async.prompt.split import check_id, held_out_id


class ByteRenderer:
    """A Renderer that needs no library: token ids are bytes."""

    stop_token_ids = (0,)
    pad_token_id = 0
    vocab_size = 256

    def render(self, text, system=""):
        return np.frombuffer((system + text).encode(), dtype=np.uint8).astype(np.int32)

    def render_messages(self, messages):
        return self.render("".join(f"<{message['role']}>{message['content']}" for message in messages))

    def encode(self, text):
        return self.render(text)

    def decode(self, token_ids):
        return bytes(np.asarray(token_ids, dtype=np.uint8)).decode()


class FakeSource:
    """The smallest PromptSource: numbers to be copied."""

    name = "copy"

    def __init__(self, seed=0):
        self._seed = seed

    def __len__(self):
        return 40

    def prompt(self, id):
        check_id(id, self.name, len(self))
        return self._make(f"{(id.index + 3 * self._seed + id.epoch) % len(self)}=", id)

    def held_out(self, num_prompts):
        return [self._make(f"{100 + n}=", held_out_id(self.name, n)) for n in range(min(num_prompts, 10))]

    def _make(self, text, id):
        return Prompt(id=id, token_ids=ByteRenderer().render(text), text=text, data={"answer": text[:-1]})


def jsonl_source(folder, seed):
    path = folder / "copy.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{n}=", "answer": str(n)}) for n in range(60)))
    return JsonlSource(path, ByteRenderer(), seed=seed, held_out_fraction=0.2)


def reasoning_gym_source(folder, seed):
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    from forge_async.backends.reasoning_gym_task import ReasoningGymSource

    return ReasoningGymSource("sum", ByteRenderer(), seed=seed, num_prompts=50)


MAKERS = {"fake": lambda folder, seed: FakeSource(seed), "jsonl": jsonl_source, "reasoning_gym": reasoning_gym_source}


@pytest.fixture(params=MAKERS)
def make(request, tmp_path):
    return lambda seed=0: MAKERS[request.param](tmp_path, seed)


def texts(source, epoch):
    return [source.prompt(PromptId(source=source.name, epoch=epoch, index=i)).text for i in range(len(source))]


def test_a_prompt_carries_its_id_its_tokens_and_the_answer(make):
    source = make()
    id = PromptId(source=source.name, epoch=2, index=7)
    prompt = source.prompt(id)
    assert prompt.id == id
    assert prompt.token_ids.dtype == np.int32
    assert ByteRenderer().decode(prompt.token_ids) == prompt.text
    assert isinstance(prompt.data["answer"], str)


def test_prompts_are_the_same_in_another_instance_and_in_any_order(make):
    source, other = make(), make()
    ids = [PromptId(source=source.name, epoch=epoch, index=i) for epoch in (1, 0) for i in (9, 0, 31)]
    forward = {id: source.prompt(id).text for id in ids}
    assert {id: other.prompt(id).text for id in reversed(ids)} == forward


def test_epochs_and_seeds_differ_in_order(make):
    source = make()
    assert len({tuple(texts(source, 0)), tuple(texts(source, 1)), tuple(texts(make(seed=1), 0))}) == 3


def test_held_out_prompts_are_distinct_the_same_each_time_and_never_trained_on(make):
    source = make()
    held_out = source.held_out(10)
    names = [prompt.text for prompt in held_out]
    assert 0 < len(names) == len(set(names)) <= 10
    assert names == [prompt.text for prompt in make(seed=5).held_out(10)]
    assert names[:3] == [prompt.text for prompt in source.held_out(3)]
    assert not set(names) & {text for epoch in range(3) for text in texts(source, epoch)}


def test_ids_of_held_out_prompts_are_no_training_ids(make):
    source = make()
    ids = [prompt.id for prompt in source.held_out(5)]
    assert len(ids) == len(set(ids))
    assert all(id.source != source.name for id in ids)


def test_asking_for_more_held_out_prompts_than_there_are_gives_what_there_is(make):
    assert len(make().held_out(1000)) < 1000
    assert make().held_out(0) == []


@pytest.mark.parametrize("wrong", [{"source": "other"}, {"index": 10_000}, {"index": -1}, {"epoch": -1}])
def test_an_id_that_is_not_of_the_source_is_refused(make, wrong):
    source = make()
    with pytest.raises(ForgeError, match="Prompt"):
        source.prompt(PromptId(**{"source": source.name, "epoch": 0, "index": 0, **wrong}))


def test_data_is_plain_json(make):
    source = make()
    data = dict(source.prompt(PromptId(source=source.name, epoch=0, index=0)).data)
    assert json.loads(json.dumps(data)) == data
