"""Fixtures of the router's tests."""

from collections.abc import AsyncIterator

import pytest

from http_site import Site


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = Site()
    yield site
    await site.client.aclose()
    await site.pipeline.close()
    assert site.coordinator.open == set()
    assert site.workers.running == 0
