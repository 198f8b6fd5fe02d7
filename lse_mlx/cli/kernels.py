"""The options about device kernels that commands share."""

import os
from typing import Annotated

import typer

from lse_mlx.loading import KernelOptions, Registry, required_by

KERNELS = "Device kernels"

Kernels = Annotated[
    str,
    typer.Option(
        help='Device kernels for operations that MLX has too: "own", "stock", or "auto" for the '
        "faster of both on this device, found by a race once.",
        rich_help_panel=KERNELS,
        metavar="WHICH",  # a wider one leaves help texts no room for the variable's name below
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="On a device, use only kernels whose rows do not depend on how many are in a pass, so "
        "that the reply is the same bytes with and without the drafter. On a CPU it always is.",
        rich_help_panel=KERNELS,
    ),
]
RequireDeviceKernels = Annotated[
    bool,
    typer.Option(
        "--require-device-kernels",
        help="Refuse to compute with plain MLX or NumPy what a device kernel should; "
        "LSE_REQUIRE_DEVICE_KERNELS=1 in the environment asks for the same.",
        rich_help_panel=KERNELS,
    ),
]


def kernel_registry(kernels: str, exact: bool, require_device_kernels: bool) -> Registry:
    """The registry that the options ask for.

    Raises RequestError for options that mean nothing, and KernelError where device kernels are
    required and cannot run; a command calls this before it downloads or loads anything.
    """
    required = require_device_kernels or required_by(os.environ)
    return KernelOptions(kernels, exact, required).registry()
