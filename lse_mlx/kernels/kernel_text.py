"""The text of a Metal kernel: one file, read from the installed package or from the checkout."""

import re
from dataclasses import dataclass
from pathlib import Path

BODY_MARK = "//// body"
"""The line of a .metal file between its helper functions and its body."""

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_INCLUDE = re.compile(r'^#include "([\w.]+)"$', re.M)


@dataclass(frozen=True)
class KernelText:
    """What `mx.fast.metal_kernel` takes: helper functions, and a body without a signature.

    Comments are gone: MLX looks for the names of thread attributes and shapes in the text, and
    hashes all of it at every call. Lines keep their numbers.
    """

    helpers: str
    body: str


def kernel_folder() -> Path:
    """Where the .metal files lie: inside an installed package, at the top of a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "metal_kernels"
    return installed if installed.is_dir() else package.parent / "metal_kernels"


def read_kernel_text(name: str, folder: Path | None = None) -> KernelText:
    """The text of `<name>.metal` in `folder`, with the files it includes put in their place.

    folder: where the project keeps its kernels if None
    """
    folder = folder or kernel_folder()
    text = _with_includes((folder / f"{name}.metal").read_text("ascii"), folder, set())
    helpers, mark, body = text.partition(f"\n{BODY_MARK}\n")
    assert mark, f"{name}.metal has no line {BODY_MARK!r}"
    return KernelText(_without_comments(helpers), _without_comments(body))


def _with_includes(text: str, folder: Path, done: set[str]) -> str:
    def included(line: re.Match[str]) -> str:
        name = line[1]
        if name in done:
            return ""
        done.add(name)
        return _with_includes((folder / name).read_text("ascii"), folder, done)

    return _INCLUDE.sub(included, text)


def _without_comments(text: str) -> str:
    return _COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), text)
