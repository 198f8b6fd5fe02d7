"""lse-mlx: lossless speculative decoding with MLX. `load()` gives an `Engine`."""

from importlib.metadata import version

from lse_mlx.decode.session import Session
from lse_mlx.engine import Engine, Piece, Result, load
from lse_mlx.errors import CheckpointError, DraftError, LseError, RequestError, TargetError

__version__ = version("lse-mlx")
__all__ = [
    "CheckpointError",
    "DraftError",
    "Engine",
    "LseError",
    "Piece",
    "RequestError",
    "Result",
    "Session",
    "TargetError",
    "load",
]
