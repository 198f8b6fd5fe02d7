"""Drafter tests run on the CPU, where a row's bits are promised; those marked gpu choose theirs."""

from collections.abc import Iterator

import mlx.core as mx
import pytest


@pytest.fixture(autouse=True, scope="module")
def on_cpu() -> Iterator[None]:
    before = mx.default_device()
    mx.set_default_device(mx.Device(mx.cpu))
    yield
    mx.set_default_device(before)
