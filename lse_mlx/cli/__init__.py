"""The `lse-mlx` command."""

import sys


def run() -> None:
    """Run the command. Ctrl-C ends it quietly with status 130, also while MLX is being imported."""
    try:
        from lse_mlx.cli.main import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)
