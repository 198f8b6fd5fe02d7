"""lse-mlx: lossless speculative decoding with MLX. `load()` gives an `Engine`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lse_mlx.decode.session import Session
    from lse_mlx.engine import Engine, EngineStats, Piece, Result, WarmupReport, load
    from lse_mlx.errors import (
        CheckpointError,
        DraftError,
        KernelError,
        LseError,
        RequestError,
        TargetError,
    )

__version__: str
__all__ = [
    "CheckpointError",
    "DraftError",
    "Engine",
    "EngineStats",
    "KernelError",
    "LseError",
    "Piece",
    "RequestError",
    "Result",
    "Session",
    "TargetError",
    "WarmupReport",
    "load",
]


def __getattr__(name: str) -> Any:
    # Looked up when asked for: MLX takes a second to import, in which the command minds Ctrl-C, and
    # scripts/convert_dflash2_q8.py uses parts of a package that is not installed.
    if name == "__version__":
        return import_module("importlib.metadata").version("lse-mlx")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    engine, errors = (import_module(f"{__name__}.{home}") for home in ("engine", "errors"))
    return getattr(engine if hasattr(engine, name) else errors, name)
