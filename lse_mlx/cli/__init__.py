"""The `lse-mlx` command."""

import os
import signal
import sys

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


def run() -> None:
    """Run the command. Ctrl-C ends it quietly with status 130, also while MLX is being imported."""
    # Python's import system can swallow an interrupt that is raised in it, so none is raised there:
    # nothing has been begun yet that would have to be cleaned up.
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from lse_mlx.cli.main import app

    signal.signal(signal.SIGINT, before)
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
