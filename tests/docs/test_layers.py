"""Imports point one way: docs/architecture.md draws it, this holds the code to it."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "lse_mlx"
BASE = {"errors", "distribution"}
# What each part of the package may import, besides itself.
MAY_IMPORT = {
    "errors": set(),
    "distribution": {"errors"},
    "kernels": BASE,
    "drafters": BASE | {"checkpoints", "kernels"},
    "target": BASE | {"checkpoints", "kernels"},
    "demo_pair": set(),
    "checkpoints": BASE | {"demo_pair"},
    "decode": BASE | {"drafters", "kernels", "target"},
    "races": BASE | {"checkpoints", "drafters", "kernels", "target"},
    "warmup": BASE | {"checkpoints", "decode", "drafters", "kernels", "races", "target"},
    "protocol": {"errors"},
    "replies": BASE | {"decode"},
    "engine": BASE | {"decode", "drafters", "kernels", "replies", "target", "warmup"},
    "loading": BASE | {"checkpoints", "drafters", "engine", "kernels", "target", "warmup"},
    "__init__": BASE | {"decode", "engine", "loading", "replies"},
    "routes": BASE | {"decode", "drafters", "protocol", "target"},
    "traces": BASE | {"checkpoints", "decode", "drafters", "protocol", "routes", "target"},
    "comparison": BASE | {"engine", "replies", "target"},
    "selftest": BASE
    | {"checkpoints", "demo_pair", "engine", "kernels", "loading", "replies", "target"},
    "qualify": BASE
    | {
        "checkpoints",
        "decode",
        "demo_pair",
        "drafters",
        "engine",
        "protocol",
        "replies",
        "target",
        "traces",
    },
    "__main__": {"cli"},
    "cli": BASE
    | {
        "__init__",
        "checkpoints",
        "comparison",
        "decode",
        "demo_pair",
        "engine",
        "loading",
        "protocol",
        "qualify",
        "replies",
        "routes",
        "selftest",
        "traces",
    },
}


def part_of(module: str) -> str:
    """The part of the package that `lse_mlx.a.b` belongs to: `a`, or `__init__` for the package."""
    return [*module.split("."), "__init__"][1]


def imported_by(path: Path) -> set[str]:
    """Every module of the package that the file `path` imports, anywhere in it."""
    package = ["lse_mlx", *path.relative_to(PACKAGE).parts[:-1]]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*up, *([node.module] if node.module else [])])
            if module == "lse_mlx":  # from lse_mlx import engine, or from lse_mlx import load
                names = {alias.name for alias in node.names}
                found.update(f"lse_mlx.{n}" if n in MAY_IMPORT else "lse_mlx" for n in names)
            else:
                found.add(module)
    return {module for module in found if module.split(".")[0] == "lse_mlx"}


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[p.relative_to(PACKAGE).as_posix() for p in FILES])
def test_imports_point_one_way(path: Path) -> None:
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    others = {part_of(module) for module in imported_by(path)} - {own}
    assert others <= MAY_IMPORT[own], f"{own} may not import {others - MAY_IMPORT[own]}"


def test_the_allowed_directions_hold_no_circle() -> None:
    done: set[str] = set()
    while ready := {n for n, below in MAY_IMPORT.items() if n not in done and below <= done}:
        done |= ready
    assert done == set(MAY_IMPORT)


def test_every_part_has_its_place() -> None:
    parts = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in FILES}
    assert parts <= set(MAY_IMPORT)


def test_nothing_is_allowed_that_nobody_needs() -> None:
    needed: dict[str, set[str]] = {name: set() for name in MAY_IMPORT}
    for path in FILES:
        own = path.relative_to(PACKAGE).with_suffix("").parts[0]
        needed[own] |= {part_of(module) for module in imported_by(path)}
    unused = {name: below - needed[name] - BASE for name, below in MAY_IMPORT.items()}
    assert not {name: parts for name, parts in unused.items() if parts}
