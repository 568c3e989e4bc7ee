"""Talk to a run or a model: `python -m forge_async.apps.generate RUN_OR_FOLDER [PROMPT ...]`."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forge_async.apps.arguments import Parser
from forge_async.apps.exit import guarded_main
from forge_async.apps.one_process import ENGINE, say_one_process
from forge_async.backends import folder_engine
from forge_async.config import Config, from_file
from forge_async.core.errors import ConfigError, one_sentence
from forge_async.core.versions import PolicyVersion
from forge_async.pipeline.checkpoints import whole_checkpoints
from forge_async.policy.ports import GenerationRequest, Sampling
from forge_async.policy.service import RequestService
from forge_async.policy.settings import PolicySettings
from forge_async.prompt.ports import Renderer
from forge_async.runtime.model_shape import ModelShape, read_shape

MAX_MODEL_TOKENS = 2048
"""Longest prompt and completion together, where the model allows that much."""
MAX_AT_ONCE = 8
"""Prompts that are completed together."""
NEW_TOKENS = 128
"""Longest completion of a folder that is no run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is talked to."""

    folder: Path
    step: int
    """Learner step of a checkpoint, 0 for other folders."""
    config: Config
    """The run's, or the defaults."""
    new_tokens: int
    """Longest completion unless the command line says otherwise."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code: 0 done, 1 failed, 2 bad usage, 130 interrupted."""
    return guarded_main(lambda: _main(parse(sys.argv[1:] if argv is None else argv)))


def _main(options: argparse.Namespace) -> int:
    asyncio.run(talk(find_model(options.model), options))
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line. Raises ConfigError."""
    parser = Parser(prog="python -m forge_async.apps.generate", description=__doc__)
    parser.add_argument("model", metavar="RUN_OR_FOLDER", help="a run's directory, or a Hugging Face folder")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="none: each line of the standard input is one")
    parser.add_argument("--max-new-tokens", type=int, help="token limit of a completion; without it, the run's")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default: the likeliest token each time")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    options = parser.parse_intermixed_args(argv)
    if options.max_new_tokens is not None and options.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens={options.max_new_tokens} must be 1 or more.")
    if not (math.isfinite(options.temperature) and options.temperature >= 0):
        raise ConfigError(f"--temperature={options.temperature:g} must be 0 or more.")
    return options


def find_model(text: str) -> Model:
    """The newest checkpoint of a run, or the folder itself. Raises ConfigError when it is neither."""
    path = Path(text).expanduser().resolve()
    if (path / "config.json").is_file():
        return Model(folder=path, step=_step(path), config=Config(), new_tokens=NEW_TOKENS)
    if not path.is_dir():
        raise ConfigError(f"{text} is no folder; give a run's directory or a Hugging Face folder.")
    if not (path / "config.yaml").is_file():
        raise ConfigError(f"{text} is neither a run's directory (no config.yaml) nor a model (no config.json).")
    # A folder without config.json is no model, whoever made it.
    checkpoints = [each for each in whole_checkpoints(path / "checkpoints") if (each / "config.json").is_file()]
    if not checkpoints:
        raise ConfigError(
            f"{text} has no checkpoint yet; a run writes one at its end and every checkpoint.every_steps."
        )
    folder, config = checkpoints[-1], from_file(path / "config.yaml")
    return Model(folder=folder, step=_step(folder), config=config, new_tokens=config.sampling.max_new_tokens)


def _step(folder: Path) -> int:
    name, _, number = folder.name.rpartition("-")
    return int(number) if name == "step" and number.isdigit() else 0


async def talk(model: Model, options: argparse.Namespace) -> None:
    """Start the engine, load the weights, and answer every prompt."""
    shape = read_shape(model.folder)
    new_tokens = options.max_new_tokens or model.new_tokens
    settings = engine_settings(model, shape, max(1, len(options.prompts)))
    if new_tokens >= settings.max_model_tokens:
        raise ConfigError(f"--max-new-tokens={new_tokens} leaves no room in {settings.max_model_tokens} tokens.")
    renderer = _renderer(model)
    say_one_process(model.config, ENGINE)
    print(f"loading {model.folder} ...", file=sys.stderr, flush=True)
    service = RequestService(lambda: _build_engine(model, settings))
    await service.start()
    try:
        sampling = Sampling(
            max_new_tokens=new_tokens,
            temperature=options.temperature,
            stop_token_ids=renderer.stop_token_ids,
            stop_strings=tuple(model.config.sampling.stop),
        )
        answers = Answers(service, renderer, sampling, model.config.task.system, options.seed, settings)
        if options.prompts:
            await answers.all(options.prompts)
        else:
            await answers.one_by_one(_lines())
    finally:
        await service.close()


class Answers:
    """Prompts to printed completions."""

    def __init__(
        self,
        service: RequestService,
        renderer: Renderer,
        sampling: Sampling,
        system: str,
        seed: int,
        settings: PolicySettings,
    ) -> None:
        self._service, self._renderer, self._sampling = service, renderer, sampling
        self._system, self._seed, self._room = system, seed, settings.max_model_tokens - sampling.max_new_tokens

    async def all(self, prompts: Sequence[str]) -> None:
        """Complete prompts together; print each with its completion below, or the completion alone of a single one."""
        requests = [self._request(number, self._render(text)) for number, text in enumerate(prompts)]
        results = await self._service.generate(requests)
        for text, result in zip(prompts, results, strict=True):
            answer = self._text(result)
            print(answer if len(prompts) == 1 else f"> {text}\n{answer}\n")

    async def one_by_one(self, lines: AsyncIterator[str]) -> None:
        """Complete each line as it comes; one that cannot be used is told, and the talk goes on."""
        number = 0
        async for line in lines:
            number += 1
            try:
                request = self._request(number, self._render(line))
            except ConfigError as error:
                print(one_sentence(error), file=sys.stderr)
                continue
            print(self._text((await self._service.generate([request]))[0]), flush=True)

    def _render(self, text: str) -> np.ndarray:
        ids = self._renderer.render(text, self._system)
        if len(ids) > self._room:
            raise ConfigError(f"The prompt has {len(ids)} tokens and there is room for {self._room}; shorten it.")
        return ids

    def _request(self, number: int, ids: np.ndarray) -> GenerationRequest:
        return GenerationRequest(
            id=f"prompt-{number}", prompt_token_ids=ids, num_samples=1, seed=self._seed, sampling=self._sampling
        )

    def _text(self, result: Any) -> str:
        completions = result.completions
        cut = " [...]" if completions.truncated[0] else ""
        return self._renderer.decode(completions.token_ids) + cut


def engine_settings(model: Model, shape: ModelShape, num_prompts: int) -> PolicySettings:
    """An engine just large enough for the prompts, with the run's dtype."""
    policy = model.config.policy
    longest, sequences = min(shape.max_positions, MAX_MODEL_TOKENS), min(num_prompts, MAX_AT_ONCE)
    blocks = sequences * -(-longest // policy.block_tokens) + 1  # vLLM keeps one block for itself
    need = blocks * policy.block_tokens * shape.kv_bytes_per_token(policy.dtype)
    return PolicySettings(
        dtype=policy.dtype,
        block_tokens=policy.block_tokens,
        max_model_tokens=longest,
        max_sequences=sequences,
        max_batch_tokens=max(longest, 2048),
        kv_cache_bytes=max(need, 1 << 20),
    )


def _renderer(model: Model) -> Renderer:
    from forge_async.backends.hf_renderer import HfRenderer

    return HfRenderer(model.folder, chat=model.config.task.chat)


def _build_engine(model: Model, settings: PolicySettings) -> Any:
    return folder_engine.build(model.folder, settings, PolicyVersion(step=model.step))


async def _lines() -> AsyncIterator[str]:
    """Lines of the standard input that are not blank, to its end."""
    asks = sys.stdin.isatty()
    while True:
        if asks:
            print("> ", end="", file=sys.stderr, flush=True)
        line = await asyncio.to_thread(sys.stdin.readline)
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


if __name__ == "__main__":
    sys.exit(main())
