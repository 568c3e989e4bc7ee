"""From a command line to a Config: sources, their order, types, interpolation, presets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forge_async.config import Config, check, compose, from_file, load, problems
from forge_async.config.loading import parse
from forge_async.config.presets import ALL_PRESETS
from forge_async.config.schema import KEYS, SECTIONS
from forge_async.config.sources import shipped_names
from forge_async.core.errors import ConfigError
from forge_async.replay.bound import UNLIMITED


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_no_argument_gives_the_default_run() -> None:
    config, options = load([])
    assert config == Config()
    assert not options.help and not options.dry_run


def test_tiny_cpu_is_the_default_run() -> None:
    assert load(["--config", "tiny_cpu"])[0] == Config()


@pytest.mark.parametrize("name", shipped_names())
def test_every_shipped_configuration_passes_all_checks(name: str) -> None:
    load(["--config", name])


def test_recipes_and_places_merge() -> None:
    config, _ = load(["--config", "qwen3_1p7b_8gpu", "--config", "slurm", "job.partition=gpu"])
    assert (config.job.kind, config.job.gpus_per_host, config.job.partition) == ("slurm", 8, "gpu")
    assert (config.learner.ranks, config.policy.replicas) == (4, 4)


def test_shipped_configurations_say_how_to_start_them() -> None:
    for path in (Path(__file__).parents[3] / "configs").glob("*.yaml"):
        head = path.read_text(encoding="utf-8").split("\n\n")[0]
        assert f"--config {path.stem}" in head, path
        assert ("NOT RUN ON A" in head) == any(word in path.stem for word in ("gpu", "slurm", "kubernetes"))


def test_every_settings_class_of_the_package_has_a_section() -> None:
    package = Path(__file__).parents[3] / "forge_async"
    declared = [
        name
        for file in package.rglob("*.py")
        for name in re.findall(r"^class (\w+Settings)\b", file.read_text(encoding="utf-8"), re.MULTILINE)
        if file.parent.parent == package
        and file.parent.name not in ("actors", "runtime")
        and "core.settings" in file.read_text()
    ]
    assert sorted(declared) == sorted(cls.__name__ for cls in SECTIONS.values())
    assert all(key.meta["doc"] for key in KEYS.values())


def test_later_files_and_then_overrides_win(tmp_path: Path) -> None:
    first = write(tmp_path / "a.yaml", "steps: 1\nseed: 1\ngroup_size: 2\nasync:\n  window: 3\n")
    second = write(tmp_path / "b.yaml", "steps: 2\nseed: 2\nasync.publish_every: 2\n")
    config = compose([first, second], ["steps=3", "steps=4"])
    assert (config.root.steps, config.root.seed, config.root.group_size) == (4, 2, 2)
    assert (config.asynchrony.window, config.asynchrony.publish_every) == (3, 2)


def test_words_of_the_command_line_stand_in_any_order() -> None:
    options = parse(["a=1", "--dry-run", "--config", "x", "b=2", "--config=y", "--help"])
    assert options.configs == ("x", "y") and options.overrides == ("a=1", "b=2")
    assert options.dry_run and options.help


def test_help_looks_at_nothing_else() -> None:
    config, options = load(["--help", "nonsense", "--config", "missing"])
    assert options.help and config == Config()


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("optimizer.lr=1e-6", "optimizer.lr", 1e-6),
        ("optimizer.lr=1", "optimizer.lr", 1.0),
        ("steps=1_000", "steps", 1000),
        ("observe.trace=no", "observe.trace", False),
        ("job.slurm_args=[--account=x,--gres=gpu:8]", "job.slurm_args", ["--account=x", "--gres=gpu:8"]),
        ("job.slurm_args=[1, yes]", "job.slurm_args", ["1", "yes"]),
        ("eval.k=[1, 4]", "eval.k", [1, 4]),
        ("task.options={max_terms: 3, negative: true}", "task.options", {"max_terms": 3, "negative": True}),
        ("task.options.max_terms=3", "task.options", {"max_terms": 3}),
        ("task.chat=on", "task.chat", "on"),
        ("job.time_limit=01:30:00", "job.time_limit", "01:30:00"),
        ("job.name=0123", "job.name", "0123"),
        ("job.name='01: 23'", "job.name", "01: 23"),
        ("job.name='", "job.name", "'"),
        ("task.system=Say: {a} = [b, c] # d", "task.system", "Say: {a} = [b, c] # d"),
        ("prompts=null", "prompts", ""),
        ("prompts=", "prompts", ""),
        ("prompts='null'", "prompts", "null"),
        ("task.system=\\${no interpolation}", "task.system", "${no interpolation}"),
        ("steps=${oc.env:NUMBER}", "steps", 7),
        ("steps=${oc.env:ABSENT,9}", "steps", 9),
        ("task.system=v${seed} of ${task.name}", "task.system", "v0 of spell"),
        ("run.dir=~/x", "run.dir", str(Path("~/x").expanduser())),
    ],
)
def test_overrides_are_read_with_their_keys_type(word: str, key: str, value: object, monkeypatch) -> None:
    monkeypatch.setenv("NUMBER", "7")
    got = compose([], [word]).value(key)
    assert got == value and type(got) is type(value)


def test_files_are_read_with_their_keys_type(tmp_path: Path) -> None:
    text = "task: {chat: on, name: 123, options: {a: 1e-3, b: on}}\njob:\n  time_limit: 01:30:00\n  image:\nasync:\n"
    config = compose([write(tmp_path / "a.yaml", text)])
    assert (config.task.chat, config.task.name, config.task.options) == ("on", "123", {"a": 1e-3, "b": True})
    assert (config.job.time_limit, config.job.image) == ("01:30:00", "")


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert compose([write(tmp_path / "a.yaml", "# nothing\n")]) == Config()


def test_a_mapping_replaces_and_an_entry_adds(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "task: {options: {a: 1, b: 2}}")
    assert compose([path], ["task.options={c: 3}"]).task.options == {"c": 3}
    assert compose([path], ["task.options.b=3"]).task.options == {"a": 1, "b": 3}


def test_interpolation_sees_the_final_values(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "rollout: {workers: '${policy.replicas}'}")
    assert compose([path], ["policy.replicas=3"]).rollout.workers == 3


def test_defaults_are_not_shared_between_configurations() -> None:
    compose([], ["steps=3", "task.options.a=1", "job.slurm_args=[a]"])
    assert compose() == Config()


@pytest.mark.parametrize(
    ("buffer", "staleness", "window"),
    [("none", 0, 1), ("double", 1, 1), ("bounded", 2, 1), ("stream", UNLIMITED, UNLIMITED)],
)
def test_buffer_presets_set_their_dials(buffer: str, staleness: int, window: int) -> None:
    config, _ = load([f"async.buffer={buffer}"])
    assert (config.asynchrony.max_staleness, config.asynchrony.window) == (staleness, window)


def test_a_later_preset_wins_over_an_earlier_staleness(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "async: {max_staleness: 5, window: 2}")
    assert load(["--config", path, "async.buffer=none"])[0].asynchrony.max_staleness == 0
    assert load(["--config", path, "async.buffer=bounded"])[0].asynchrony.max_staleness == 5


def test_an_earlier_preset_is_undone_by_bounded(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "async: {buffer: none}")
    assert compose([path], ["async.buffer=bounded"]) == Config()


@pytest.mark.parametrize("buffer", ["none", "double", "stream"])
def test_a_resolved_preset_loads_again(buffer: str, tmp_path: Path) -> None:
    config = compose([], [f"async.buffer={buffer}"])
    again = from_file(write(tmp_path / "config.yaml", config.to_yaml()))
    check(again)
    assert again == config


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("3", 3), ("'3'", 3), ("${policy.replicas}", 1)])
def test_a_word_may_stand_where_a_number_may(text: str, value: int | str, tmp_path: Path) -> None:
    config, _ = load([f"async.max_staleness={text}"])
    assert config.asynchrony.max_staleness == value
    assert from_file(write(tmp_path / "config.yaml", config.to_yaml())) == config


def test_a_number_from_the_environment_is_a_number(monkeypatch) -> None:
    monkeypatch.setenv("AGE", "4")
    assert compose([], ["async.max_staleness=${oc.env:AGE}"]).asynchrony.max_staleness == 4


def test_from_file_reads_a_run_that_exists(tmp_path: Path) -> None:
    config = Config().replace({"run.dir": str(tmp_path), "model.path": "/gone"})
    assert from_file(write(tmp_path / "config.yaml", config.to_yaml())) == config


def test_a_bare_file_name_is_a_file_for_from_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "tiny_cpu", "steps: 3")
    assert from_file("tiny_cpu").root.steps == 3
    assert compose(["tiny_cpu"]).root.steps == Config().root.steps
    assert compose(["./tiny_cpu"]).root.steps == 3


def stored_run(tmp_path: Path, **changes: object) -> Path:
    run = tmp_path / "run"
    for name in ("journal", "checkpoints", "logs"):
        (run / name).mkdir(parents=True)
    values = {"run.dir": str(run), "run.overwrite": True, "steps": 40, "optimizer.lr": 3e-4} | changes
    (run / "config.yaml").write_text(Config().replace(values).to_yaml())
    return run


def test_a_run_that_goes_on_keeps_its_settings_unless_told_otherwise(tmp_path: Path) -> None:
    run = stored_run(tmp_path)
    config, _ = load(["run.resume=true", f"run.dir={run}", "steps=60"])
    assert (config.root.steps, config.optimizer.lr, config.run.overwrite) == (60, 3e-4, False)
    config, _ = load(
        ["run.resume=true", f"run.dir={run}", "--config", write(tmp_path / "a.yaml", "policy: {replicas: 2}")]
    )
    assert (config.root.steps, config.policy.replicas) == (40, 2)
    assert load([f"run.dir={tmp_path / 'other'}"])[0].optimizer.lr == Config().optimizer.lr


@pytest.mark.parametrize("word", ["seed=7", "groups_per_step=8", "task.name=sum", "task.options={a: 1}"])
def test_what_a_run_draws_its_prompts_from_cannot_change_on_the_way(word: str, tmp_path: Path) -> None:
    run = stored_run(tmp_path)
    key, said = word.partition("=")[0], "cannot change in a run that goes on"
    with pytest.raises(ConfigError, match=rf"^{key}=.* {said}: .* with {key}=.*leave {key} out"):
        load(["run.resume=true", f"run.dir={run}", word])
    same = "{}" if KEYS[key].is_mapping else KEYS[key].default
    load(["run.resume=true", f"run.dir={run}", f"{key}={same}"])


def test_the_configs_folder_is_the_shipped_one() -> None:
    root = Path(__file__).parents[3]
    assert (root / "configs").resolve() == (root / "forge_async/config/shipped").resolve()


def test_values_are_found_and_replaced_by_dotted_key() -> None:
    config = Config().replace({"async.max_staleness": 0, "steps": 5})
    assert config.value("async.max_staleness") == config.asynchrony.max_staleness == 0
    assert config.value("steps") == config.root.steps == 5
    with pytest.raises(KeyError):
        config.value("nope")


@pytest.mark.parametrize(("key", "word"), [(key, word) for key in ALL_PRESETS for word in ALL_PRESETS[key]])
def test_every_preset_sets_keys_that_exist_to_values_that_are_accepted(key: str, word: str) -> None:
    config = compose([], [f"{key}={word}"])
    assert {name: config.value(name) for name in ALL_PRESETS[key][word]} == ALL_PRESETS[key][word]
    assert list(problems(config)) == []


def test_what_is_given_beside_a_name_wins_over_what_the_name_sets(tmp_path: Path) -> None:
    config = compose([], ["objective.name=gspo", "objective.clip_low=1e-3"])
    assert (config.objective.clip_low, config.objective.clip_high) == (1e-3, 4e-4)
    path = write(tmp_path / "a.yaml", "objective: {clip_high: 0.5}")
    assert compose([path], ["objective.name=gspo"]).objective.clip_high == 4e-4
    assert compose([path], ["objective.name=grpo"]).objective.clip_high == 0.5


def test_a_name_that_is_replaced_leaves_nothing_behind(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "{objective: {name: rloo}, async: {correction: icepop}}")
    assert compose([path], ["objective.name=grpo", "async.correction=token_is"]) == Config()


def test_a_constant_length_is_the_limit_unless_given() -> None:
    limit = Config().sampling.max_new_tokens
    assert compose([], ["objective.name=dr_grpo"]).whole_objective().constant_tokens == limit
    assert compose([], ["objective.constant_tokens=7"]).whole_objective().constant_tokens == 7


@pytest.mark.parametrize(
    ("words", "held"),
    [
        (["async.swap=drain"], 1),
        (["learner.lora.rank=8"], 1),
        (["learner.lora.rank=8", "async.swap=drain", "weights.merge_adapters=true"], 1),
        (["learner.lora.rank=8", "async.swap=drain", "async.max_staleness=2"], 4),
        (["learner.lora.rank=8", "async.swap=drain", "async.max_staleness=30"], 8),
        (["learner.lora.rank=8", "async.swap=drain", "async.buffer=stream"], 8),
    ],
)
def test_an_engine_has_room_for_the_adapters_that_a_drain_keeps(words, held):
    config, _ = load(words)
    assert config.adapters_held() == held
