"""DFlash2: a block drafter that reads its target's features and drafts a block in one pass."""

from lse_mlx.checkpoints.drafter_config import DFlash2Config
from lse_mlx.drafters.dflash2.drafter import DFlash2, DFlash2Context, load_dflash2

__all__ = ["DFlash2", "DFlash2Config", "DFlash2Context", "load_dflash2"]
