"""The harness runs on the CPU: every test here has it as MLX's default device."""

from collections.abc import Iterator

import pytest

from tests.tiny_models import on_cpu


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    with on_cpu():
        yield
