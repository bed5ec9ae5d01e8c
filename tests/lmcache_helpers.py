"""What tests of LMCache share: its modules without their warnings, and quiet."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def imported(name: str) -> Any:
    """A module; LMCache's logging warns of its own dependency at every import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


@contextmanager
def quiet() -> Iterator[None]:
    """LMCache logs what it refuses."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
