"""A trainer or another runtime can use the protocol alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "lse_mlx" / "protocol"
MODULES = ["lse_mlx.protocol", *(f"lse_mlx.protocol.{p.stem}" for p in PACKAGE.glob("[!_]*.py"))]
LIST = "import importlib, json, sys; importlib.import_module(sys.argv[1]); print(json.dumps([*sys.modules]))"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_loads_neither_mlx_nor_the_engine(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIST, module], capture_output=True, text=True, check=True
    )
    loaded = json.loads(done.stdout)
    own = {name for name in loaded if name.split(".")[0] == "lse_mlx"}
    allowed = {"lse_mlx", "lse_mlx.errors", *MODULES}
    assert own <= allowed
    assert not [n for n in loaded if n.split(".")[0] in {"mlx", "mlx_lm", "transformers", "torch"}]
