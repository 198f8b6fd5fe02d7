"""The text of a Metal kernel: one file, read from the installed package or from the checkout."""

import re
from dataclasses import dataclass
from pathlib import Path

from lse_mlx.errors import KernelError

BODY_MARK = "//// body"
"""The line of a .metal file between its helper functions and its body."""

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_INCLUDE = re.compile(r'^#include "([\w.]+)"$', re.M)


@dataclass(frozen=True)
class KernelText:
    """What `mx.fast.metal_kernel` takes: helper functions, and a body without a signature.

    Comments are gone: MLX looks for the names of thread attributes and shapes in the text, and
    hashes all of it at every call. `#line` says where each part stands, so that a compiler names
    lines of the files in metal_kernels.
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
    Raises KernelError where a file holds anything but ASCII.
    """
    folder = folder or kernel_folder()
    file = folder / f"{name}.metal"
    helpers, mark, body = _ascii(file).partition(f"\n{BODY_MARK}\n")
    assert mark, f"{name}.metal has no line {BODY_MARK!r}"
    done: set[str] = set()
    first = helpers.count("\n") + 3  # the mark's own line lies between
    # MLX writes its signature right behind the helpers, which may end in a line of the preprocessor.
    return KernelText(_numbered(helpers, file, 1, done) + "\n", _numbered(body, file, first, done))


def _numbered(text: str, file: Path, first: int, done: set[str]) -> str:
    """`text`, which begins at line `first` of `file`, with its includes and without comments."""
    text = _without_comments(text)

    def included(line: re.Match[str]) -> str:
        name = line[1]
        if name in done:
            return ""
        done.add(name)
        inside = file.with_name(name)
        behind = first + text.count("\n", 0, line.end()) + 1
        return f'{_numbered(_ascii(inside), inside, 1, done)}\n#line {behind} "{file.name}"'

    return f'#line {first} "{file.name}"\n' + _INCLUDE.sub(included, text)


def _ascii(file: Path) -> str:
    stored = file.read_bytes()
    try:
        return stored.decode("ascii")
    except UnicodeDecodeError as error:
        line = stored.count(b"\n", 0, error.start) + 1
        raise KernelError(
            f"{file.name}:{line} holds the byte 0x{stored[error.start]:02x}, and Metal's compiler "
            "gets ASCII only, comments included: write it in ASCII."
        ) from None


def _without_comments(text: str) -> str:
    return _COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), text)
