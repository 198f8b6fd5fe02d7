"""What the package imports is what it declares."""

import ast
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def third_parties(folder: Path) -> set[str]:
    """Top-level modules that the files below `folder` import from outside."""
    names: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - {"lse_mlx"}


def test_every_import_is_declared() -> None:
    declared = {Requirement(r).name.replace("-", "_") for r in PROJECT["dependencies"]}
    assert third_parties(ROOT / "lse_mlx") <= declared
