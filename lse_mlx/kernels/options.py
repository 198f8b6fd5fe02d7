"""What a user says about device kernels, and the registry that follows from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from lse_mlx.errors import RequestError, shown
from lse_mlx.kernels.choices import STOCK, Choices, Mode
from lse_mlx.kernels.registry import Registry

REQUIRED = "LSE_REQUIRE_DEVICE_KERNELS"
"""The variable of the environment that requires device kernels: 1, or 0 as if it were not set."""


@dataclass(frozen=True)
class KernelOptions:
    """How an engine is to use device kernels.

    kernels:  for operations that stock MLX has too: "own" or "stock" kernels, or "auto" for the
              faster of both; where MLX has none, this project's serve in any case
    exact:    the same bytes with and without the drafter, at the price of speed
    required: a call that no device kernel can serve is an error
    Raises RequestError for a value that means nothing, or two that contradict each other.
    """

    kernels: str = "auto"
    exact: bool = False
    required: bool = False

    def __post_init__(self) -> None:
        modes = get_args(Mode)
        if self.kernels not in modes:
            raise RequestError(
                f"The kernels are {str(self.kernels)[:60]!r}: give one of {', '.join(modes)}."
            )
        for name, value in (("exact", self.exact), ("require_device_kernels", self.required)):
            check_bool(name, value)
        if self.exact and self.kernels == STOCK:
            raise RequestError(
                "The kernels are 'stock', but exact decoding needs rows that do not depend on each "
                "other: leave out one of the two."
            )

    def registry(self) -> Registry:
        """A registry for MLX's default device.

        Raises KernelError where device kernels are required and the device is the CPU.
        """
        [mode] = [mode for mode in get_args(Mode) if mode == self.kernels]
        return Registry.for_device(Choices(mode, self.exact), self.required)


def check_bool(name: str, value: object) -> None:
    """RequestError for an option that must be True or False and is neither."""
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {shown(value)}: give True or False.")


def required_by(environ: Mapping[str, str]) -> bool:
    """Whether the environment requires device kernels; RequestError for a value that is unclear."""
    value = environ.get(REQUIRED, "")
    if value not in ("", "0", "1"):
        raise RequestError(f"{REQUIRED} is {value[:60]!r}: set it to 1 or 0, or not at all.")
    return value == "1"
