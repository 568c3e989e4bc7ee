"""Engines that several suites share. Ends Monarch's client with the session, so that the interpreter exits quietly."""

from __future__ import annotations

import contextlib
import sys

import pytest

from forge_async.core.versions import PolicyVersion
from forge_async.learner.settings import LORA_TARGETS
from tests.child import Child
from tests.engines import VERSIONS, FakeSubject, VllmAdapterSubject, VllmSubject
from tests.models import make_model, random_adapter, without_end


def pytest_sessionfinish():
    if "monarch.actor" in sys.modules:
        from monarch.actor import shutdown_context

        with contextlib.suppress(TimeoutError):
            shutdown_context(host_timeout=0.5).get(timeout=5)


@pytest.fixture(scope="module")
def children(tmp_path_factory):
    """Two processes; the first is also the one of the one-rank tests."""
    made = [Child(tmp_path_factory.mktemp("titan") / f"log{rank}") for rank in range(2)]
    yield made
    for child in made:
        child.close()


@pytest.fixture(scope="session")
def engine_child(tmp_path_factory):
    """The one process that hosts vLLM engines, since its start costs half a minute."""
    made = Child(tmp_path_factory.mktemp("vllm") / "log")
    yield made
    made.close()


@pytest.fixture(scope="session")
def mixture_child(tmp_path_factory):
    """The same for mixtures of experts: vLLM makes their process group with the first engine of a process, or never."""
    made = Child(tmp_path_factory.mktemp("vllm-mixtures") / "log")
    yield made
    made.close()


ENGINES = (
    "fake",
    pytest.param("vllm", marks=pytest.mark.stack),
    pytest.param("vllm_adapter", marks=[pytest.mark.stack, pytest.mark.long]),
    pytest.param("vllm_on_two_ranks", marks=[pytest.mark.stack, pytest.mark.long]),
)


@pytest.fixture(scope="session")
def ranks_child(tmp_path_factory):
    """The process of an engine whose model lies on two ranks, which are processes of their own."""
    made = Child(tmp_path_factory.mktemp("ranks") / "log", timeout_s=400)
    yield made
    made.close()


@pytest.fixture(scope="session", params=ENGINES)
def engine_subject(request, tmp_path_factory):
    """An engine, two sets of weights for it, and what a reference computes with them."""
    if request.param == "fake":
        return FakeSubject()
    if request.param == "vllm_adapter":
        folder = tmp_path_factory.mktemp("adapters")
        base = without_end(make_model(folder / "base"))
        adapters = [random_adapter(folder / f"a{seed}", base, seed, targets=LORA_TARGETS) for seed in (1, 2)]
        return VllmAdapterSubject(request.getfixturevalue("engine_child"), base, adapters, LORA_TARGETS)
    folders = [without_end(make_model(tmp_path_factory.mktemp(f"model{seed}"), "qwen3", seed)) for seed in (0, 1)]
    if request.param == "vllm":
        return VllmSubject(request.getfixturevalue("engine_child"), folders)
    scratch = tmp_path_factory.mktemp("store") / "weights"
    return VllmSubject(request.getfixturevalue("ranks_child"), folders, scratch=scratch)


@pytest.fixture
def engine(engine_subject):
    """The engine, idle, with the first weights under a version of their own."""
    engine_subject.engine.load(engine_subject.weights[0], PolicyVersion(step=next(VERSIONS)))
    yield engine_subject.engine
    for _ in range(200):
        if not engine_subject.engine.num_unfinished():
            return
        engine_subject.engine.step()
    raise AssertionError("the test left requests that do not end")
