"""Models and instances that all parity tests share."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

import parity_models
from parity_fleet import Fleet


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 KV heads."""
    return parity_models.llama(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def few_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 KV heads."""
    return parity_models.llama(tmp_path_factory.mktemp("models"), 2)


@pytest.fixture(scope="session")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every other layer has a window."""
    return parity_models.sliding(tmp_path_factory.mktemp("models"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Fleet, None]:
    """At most 6 ranks at a time."""
    async with Fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet
