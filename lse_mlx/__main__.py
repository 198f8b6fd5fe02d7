"""`python -m lse_mlx` is `lse-mlx`."""

from lse_mlx.cli import run

run()
