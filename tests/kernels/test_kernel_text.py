"""Kernels' text: every file of the project reads, and comments and includes are gone from it."""

from pathlib import Path

import pytest

import lse_mlx
from lse_mlx.kernels.kernel_text import kernel_folder, read_kernel_text

FILES = sorted(kernel_folder().glob("*.metal"))


def test_a_checkout_has_one_copy_at_its_top():
    package = Path(lse_mlx.__file__).parent
    assert kernel_folder() in (package / "metal_kernels", package.parent / "metal_kernels")
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_kernel_of_the_project(path: Path):
    stored = path.read_bytes()
    assert stored.isascii() and b"\r" not in stored
    text = read_kernel_text(path.stem)
    for part in (text.helpers, text.body):
        assert "//" not in part
        assert "/*" not in part
        assert '#include "' not in part
    assert text.body.strip()
    assert "[[kernel]]" not in text.body, "MLX writes the signature"


def written(folder: Path, text: str, **others: str) -> Path:
    (folder / "some.metal").write_text(text)
    for name, content in others.items():
        (folder / f"{name}.h").write_text(content)
    return folder


def test_comments_go_and_lines_keep_their_numbers(tmp_path: Path):
    text = "// x_shape is not meant\nfloat f() {  /* two\nlines */ return 1; }\n//// body\na; // b\nc;\n"
    found = read_kernel_text("some", written(tmp_path, text))
    assert found.helpers == "\nfloat f() {  \n return 1; }"
    assert found.body == "a; \nc;\n"


def test_an_include_is_put_in_its_place_once(tmp_path: Path):
    text = '#include "a.h"\n#include "b.h"\n//// body\nf();\n'
    folder = written(tmp_path, text, a="void f();\n", b='#include "a.h"\nvoid g();\n')
    helpers = read_kernel_text("some", folder).helpers
    assert helpers.split() == ["void", "f();", "void", "g();"]


def test_a_kernel_without_a_body_says_so(tmp_path: Path):
    with pytest.raises(AssertionError, match=r"some\.metal has no line"):
        read_kernel_text("some", written(tmp_path, "float f();\n"))
