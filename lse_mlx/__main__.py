"""`python -m lse_mlx` is `lse-mlx`."""

from lse_mlx.cli.main import app

app()
