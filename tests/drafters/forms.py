"""Both forms of the drafter's arithmetic, on a registry of their own that runs no kernels."""

import pytest

from lse_mlx.drafters.dflash2.operations import device_operations, host_operations
from lse_mlx.kernels.registry import Registry

FORMS = pytest.mark.parametrize(
    "form",
    [device_operations(Registry("reference")), host_operations(Registry("reference"))],
    ids=["device", "host"],
)
