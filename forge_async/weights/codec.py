"""Small objects of the weight plane as bytes, for transports that leave the run's own processes.

They are pickled, but only what the weight plane itself stores is taken back: bytes from a file or a socket must not be
able to name anything else to run.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from forge_async.core.errors import WeightsError

MODULES = ("forge_async.core.versions", "forge_async.weights.manifest", "forge_async.weights.records")
"""Whose classes may be in the bytes, besides plain Python values."""


def encode(value: Any) -> bytes:
    """A value as bytes."""
    return pickle.dumps(value)


def decode(data: bytes) -> Any:
    """The value again. Raises WeightsError for bytes that `encode` did not make."""
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError) as error:
        raise WeightsError(
            f"An object of the weight store cannot be read ({error}); it is damaged or not ours."
        ) from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module not in MODULES or "." in name:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        found = super().find_class(module, name)
        if not isinstance(found, type) or found.__module__ != module:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return found
