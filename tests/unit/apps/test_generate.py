"""apps.generate with a fake engine; the real one is in tests/e2e."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from fake_folders import SMOLLM2, fake_model

from forge_async.apps import generate
from forge_async.apps.generate import engine_settings, find_model, parse
from forge_async.backends import folder_engine
from forge_async.backends.hf_renderer import HfRenderer
from forge_async.config import Config
from forge_async.core.errors import ConfigError
from forge_async.core.records import Completions
from forge_async.core.versions import PolicyVersion, VersionRuns
from forge_async.policy.ports import GenerationRequest, GenerationResult
from forge_async.runtime.model_shape import read_shape


class Parrot:
    """Engine that answers with the prompt's own tokens, up to the token limit."""

    def __init__(self) -> None:
        self.version = PolicyVersion()
        self.requests: list[GenerationRequest] = []
        self._waiting: list[GenerationRequest] = []

    def add(self, requests) -> dict[str, str]:
        self.requests += requests
        self._waiting += requests
        return {}

    def num_unfinished(self) -> int:
        return len(self._waiting)

    def step(self) -> list[GenerationResult]:
        waiting, self._waiting = self._waiting, []
        return [self._answer(request) for request in reversed(waiting)]

    def _answer(self, request: GenerationRequest) -> GenerationResult:
        said = request.prompt_token_ids[1:]
        ids = said[: request.sampling.max_new_tokens]
        completions = Completions(
            lengths=np.array([len(ids)], dtype=np.int32),
            token_ids=ids,
            logprobs=np.zeros(len(ids), dtype=np.float32),
            versions=VersionRuns.of([(len(ids), 0, 0)]),
            truncated=np.array([len(ids) < len(said)]),
            cut=np.array([False]),
        )
        return GenerationResult(id=request.id, completions=completions)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Parrot:
    parrot = Parrot()
    monkeypatch.setattr(generate, "_build_engine", lambda model, settings: parrot)
    return parrot


def make_run(folder: Path, steps: tuple[int, ...], **values) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(Config.of(values).to_yaml())
    for step in steps:
        fake_model(folder / "checkpoints" / f"step-{step:06d}")
    return folder


def test_one_prompt_prints_the_bare_completion(engine: Parrot, tmp_path: Path, capsys) -> None:
    assert generate.main([str(fake_model(tmp_path)), "3+4="]) == 0
    assert capsys.readouterr().out == "3+4=\n"
    assert engine.requests[0].sampling.temperature == 0 and engine.requests[0].sampling.stop_token_ids == (2,)


def test_several_prompts_go_in_together_and_keep_their_order(engine: Parrot, tmp_path: Path, capsys) -> None:
    words = ["1+1=", "2+2=", "--max-new-tokens", "2", "--temperature", "0.5", "--seed", "7"]
    assert generate.main([str(fake_model(tmp_path)), *words]) == 0
    assert capsys.readouterr().out == "> 1+1=\n1+ [...]\n\n> 2+2=\n2+ [...]\n\n"
    assert [(r.seed, r.sampling.temperature) for r in engine.requests] == [(7, 0.5), (7, 0.5)]


def test_options_may_stand_before_prompts(tmp_path: Path) -> None:
    options = parse(["run", "--max-new-tokens", "3", "a prompt", "another"])
    assert options.prompts == ["a prompt", "another"] and options.max_new_tokens == 3


def test_without_prompts_lines_are_answered_as_they_come(
    engine: Parrot, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\n\u00fc\ntwo\n"))
    assert generate.main([str(fake_model(tmp_path))]) == 0
    said = capsys.readouterr()
    assert said.out == "one\ntwo\n" and "cannot express" in said.err


def test_a_run_means_its_newest_whole_checkpoint_and_its_task(engine: Parrot, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", (5, 10), **{"task.system": "Sums.", "sampling.max_new_tokens": 30})
    (run / "checkpoints" / "step-000015.partial").mkdir()
    (run / "checkpoints" / "step-000020").mkdir()
    template = "{% for message in messages %}{{ message['content'] }}/{% endfor %}"
    (run / "checkpoints" / "step-000010" / "chat_template.jinja").write_text(template)
    (tmp_path / "latest").symlink_to(run)
    model = find_model(str(tmp_path / "latest"))
    assert (model.folder.name, model.step, model.new_tokens) == ("step-000010", 10, 30)
    assert generate.main([str(run), "hello"]) == 0
    renderer = HfRenderer(model.folder)
    assert renderer.decode(engine.requests[0].prompt_token_ids) == "Sums./hello/"


def test_the_engine_of_a_run_on_several_ranks_is_one_process_here_and_says_so(
    engine: Parrot, tmp_path: Path, capsys
) -> None:
    run = make_run(tmp_path / "run", (5,), **{"policy.tensor_parallel": 2, "learner.ranks": 2})
    assert generate.main([str(run), "hello"]) == 0
    said = capsys.readouterr()
    assert "policy.tensor_parallel=2 is for training: here one process holds the whole model" in said.err
    assert said.out == "hello\n"
    assert generate.main([str(run / "checkpoints" / "step-000005"), "hello"]) == 0
    assert "for training" not in capsys.readouterr().err


def test_a_checkpoints_folder_knows_its_step(tmp_path: Path) -> None:
    run = make_run(tmp_path, (5,))
    assert find_model(str(run / "checkpoints" / "step-000005")).step == 5


def test_what_cannot_be_talked_to_is_one_sentence_and_exit_2(tmp_path: Path, capsys) -> None:
    empty, fresh = tmp_path / "empty", make_run(tmp_path / "fresh", ())
    empty.mkdir()
    bare = fake_model(tmp_path / "bare", model_type="gpt2")
    model = str(fake_model(tmp_path / "model"))
    for words in (
        ["/nowhere", "hi"],
        [str(empty), "hi"],
        [str(fresh), "hi"],
        [str(bare), "hi"],
        [model, "--max-new-tokens", "0"],
        [model, "--max-new-tokens", "256", "hi"],
        [model, "--temperature", "-1"],
        [model, "--temperature", "nan"],
        [model, "--unknown"],
        [],
    ):
        assert generate.main(words) == 2, words
        assert capsys.readouterr().err.count("\n") == 1


def test_a_prompt_that_is_too_long_is_refused(engine: Parrot, tmp_path: Path, capsys) -> None:
    assert generate.main([str(fake_model(tmp_path)), "x" * 200, "--max-new-tokens", "100"]) == 2
    assert "201 tokens and there is room for 156" in capsys.readouterr().err


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = fake_model(tmp_path)
    (folder / "model.safetensors").write_text("damaged")
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        dict(folder_engine.weights_of(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no .safetensors"):
        dict(folder_engine.weights_of(folder))


def test_the_engine_is_as_large_as_the_prompts_need(tmp_path: Path) -> None:
    model = find_model(str(fake_model(tmp_path, SMOLLM2)))
    one, many = (engine_settings(model, read_shape(tmp_path), count) for count in (1, 100))
    assert one.max_model_tokens == 2048 and one.kv_cache_bytes == 65 * 32 * 46_080
    assert many.max_sequences == 8 and many.kv_cache_bytes == (8 * 64 + 1) * 32 * 46_080


def test_an_engine_that_fails_ends_with_exit_1(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model, settings):
        raise RuntimeError("no memory")

    monkeypatch.setattr(generate, "_build_engine", fail)
    assert generate.main([str(fake_model(tmp_path)), "hi"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "RuntimeError: no memory"
