"""What MLX makes of every variant of every kernel: plain text, a whole signature, clean spaces."""

import re

import pytest

from lse_mlx.kernels.kernel_text import kernel_folder, read_kernel_text
from tests.kernels.variants import Variant, variants
from tests.metal_host.generate import Parameter, parameters
from tests.metal_host.lint import clang, lint

ATTRIBUTE = re.compile(r"\s*\[\[\w+(?:\(\d+\))?\]\]")


@pytest.fixture(scope="module")
def every_variant() -> list[Variant]:
    return variants()


def test_every_kernel_is_in_the_table(every_variant: list[Variant]) -> None:
    launched = {variant.kernel.name for variant in every_variant}
    missing = {file.stem for file in kernel_folder().glob("*.metal")} - launched
    assert not missing, f"add calls of {missing} to the table in tests/kernels/variants.py"


def test_the_text_is_ascii(every_variant: list[Variant]) -> None:
    """Metal's compiler gets its text as ASCII, and anything else is lost on the way."""
    for file in kernel_folder().iterdir():
        if file.suffix in (".metal", ".h"):
            file.read_text("ascii")
    for variant in every_variant:
        assert variant.mlx_text.isascii()


def test_the_body_is_what_lies_in_the_file(every_variant: list[Variant]) -> None:
    for variant in every_variant:
        text = read_kernel_text(variant.kernel.name)
        assert (variant.kernel.header, variant.kernel.source) == (text.helpers, text.body)
        assert text.body in variant.mlx_text


def test_mlx_writes_a_whole_signature(every_variant: list[Variant]) -> None:
    """MLX closes it after the first output where no thread attribute is used and a shape is.

    It has the same parameters in the same order as the harness's, so that what the harness runs is
    what Metal compiles.
    """
    for variant in every_variant:
        taken = parameters(variant.kernel, variant.inputs, variant.output_dtypes)
        assert signature(variant) == [parameter.declaration for parameter in taken], str(variant)


def test_every_body_uses_a_thread_attribute(every_variant: list[Variant]) -> None:
    for variant in every_variant:
        taken = parameters(variant.kernel, variant.inputs, variant.output_dtypes)
        assert any(is_attribute(parameter) for parameter in taken), str(variant)


def test_inputs_do_not_change_their_address_space(every_variant: list[Variant]) -> None:
    """Below 8 elements an array is another variant, and a helper that takes it has another type."""
    for variant in every_variant:
        for name, array in zip(variant.kernel.input_names, variant.inputs, strict=True):
            assert array.ndim == 0 or array.size >= 8, f"{variant}: {name} of {array.size}"


@pytest.mark.skipif(clang() is None, reason="clang is not installed, and the lint needs it")
def test_address_spaces_are_clean(every_variant: list[Variant]) -> None:
    said = {
        str(variant): lint(variant.kernel, variant.inputs, variant.output_dtypes, variant.template)
        for variant in every_variant
    }
    assert {name: text for name, text in said.items() if text} == {}


def signature(variant: Variant) -> list[str]:
    """The parameters between the kernel's name and the brace before the body."""
    before_body = variant.mlx_text[: variant.mlx_text.index(variant.kernel.source)]
    start = before_body.index("[[kernel]] void custom_kernel_")
    inside = before_body[before_body.index("(", start) + 1 :].strip()
    assert inside.endswith(") {"), f"{variant}: {inside}"
    return [ATTRIBUTE.sub("", line).strip() for line in inside[: -len(") {")].split(",\n")]


def is_attribute(parameter: Parameter) -> bool:
    return parameter.kind is None
