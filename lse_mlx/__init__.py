"""lse-mlx: lossless speculative decoding with MLX. `load()` gives an `Engine`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lse_mlx.decode.session import Session
    from lse_mlx.engine import Engine, WarmupReport
    from lse_mlx.errors import (
        CheckpointError,
        DraftError,
        KernelError,
        LseError,
        ProtocolError,
        RequestError,
        TargetError,
    )
    from lse_mlx.loading import load
    from lse_mlx.replies import EngineStats, Piece, Result, TokenLogprob

__version__: str
_HOMES = {
    "engine": ("Engine", "Session", "WarmupReport"),
    "errors": (
        "CheckpointError",
        "DraftError",
        "KernelError",
        "LseError",
        "ProtocolError",
        "RequestError",
        "TargetError",
    ),
    "loading": ("load",),
    "replies": ("EngineStats", "Piece", "Result", "TokenLogprob"),
}
__all__ = [
    "CheckpointError",
    "DraftError",
    "Engine",
    "EngineStats",
    "KernelError",
    "LseError",
    "Piece",
    "ProtocolError",
    "RequestError",
    "Result",
    "Session",
    "TargetError",
    "TokenLogprob",
    "WarmupReport",
    "load",
]


def __getattr__(name: str) -> Any:
    # Looked up when asked for: MLX takes a second to import, in which the command minds Ctrl-C, and
    # scripts/convert_dflash2_q8.py uses parts of a package that is not installed.
    if name == "__version__":
        return import_module("importlib.metadata").version("lse-mlx")
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
