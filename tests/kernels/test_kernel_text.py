"""Kernels' text: every file of the project reads, and comments and includes are gone from it."""

from pathlib import Path

import pytest

import lse_mlx
from lse_mlx.errors import KernelError
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
        (folder / f"{name}.h").write_text(content, "utf-8")
    return folder


def test_comments_go_and_lines_keep_their_numbers(tmp_path: Path):
    text = "// x_shape is not meant\nfloat f() {  /* two\nlines */ return 1; }\n//// body\na; // b\nc;\n"
    found = read_kernel_text("some", written(tmp_path, text))
    assert found.helpers == '#line 1 "some.metal"\n\nfloat f() {  \n return 1; }\n'
    assert found.body == '#line 5 "some.metal"\na; \nc;\n'


def test_an_include_is_put_in_its_place_once(tmp_path: Path):
    text = '#include "a.h"\n#include "b.h"\n//// body\nf();\n'
    folder = written(tmp_path, text, a="void f();\n", b='#include "a.h"\nvoid g();\n')
    helpers = read_kernel_text("some", folder).helpers
    lines = [line for line in helpers.splitlines() if line and not line.startswith("#line ")]
    assert lines == ["void f();", "void g();"]


def places(text: str) -> dict[str, str]:
    """Where each line of `text` stands, as the preprocessor counts."""
    found: dict[str, str] = {}
    name, number = "", 0
    for line in text.splitlines():
        if line.startswith("#line "):
            _, first, quoted = line.split()
            name, number = quoted.strip('"'), int(first)
            continue
        found[line] = f"{name}:{number}"
        number += 1
    return found


def test_a_line_is_that_of_its_own_file(tmp_path: Path):
    text = '// contract\n\n#include "a.h"\nvoid h();\n#include "b.h"\nvoid i();\n//// body\n\nx;\n'
    folder = written(tmp_path, text, a="// of a\nvoid f();\n", b='#include "a.h"\nvoid g();\n')
    found = read_kernel_text("some", folder)
    wanted = {
        "void f();": "a.h:2",
        "void g();": "b.h:2",
        "void h();": "some.metal:4",
        "void i();": "some.metal:6",
        "x;": "some.metal:9",
    }
    assert {line: at for line, at in places(found.helpers + found.body).items() if line} == wanted


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_every_line_of_the_projects_kernels(path: Path):
    text = read_kernel_text(path.stem)
    for part in (text.helpers, text.body):
        for line, at in places(part).items():
            name, number = at.split(":")
            if line.strip():
                written = path.with_name(name).read_text("ascii").splitlines()
                assert line.rstrip() in written[int(number) - 1], at


def test_anything_but_ascii_is_named(tmp_path: Path):
    folder = written(tmp_path, '#include "a.h"\n//// body\nx;\n', a="void f();\n// \u00e9\n")
    with pytest.raises(KernelError, match=r"a\.h:2 holds the byte 0xc3"):
        read_kernel_text("some", folder)


def test_a_kernel_without_a_body_says_so(tmp_path: Path):
    with pytest.raises(AssertionError, match=r"some\.metal has no line"):
        read_kernel_text("some", written(tmp_path, "float f();\n"))
