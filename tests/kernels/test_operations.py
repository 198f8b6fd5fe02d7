"""Operations and their kernels: together they are all kernels of the project."""

from lse_mlx.kernels.kernel_text import kernel_folder
from lse_mlx.kernels.operations import kernels_of, with_kernels
from lse_mlx.kernels.registry import Registry
from lse_mlx.selftest.values import value_checks


def test_the_operations_that_the_self_test_checks_take_every_kernel_there_is():
    operations = {check.subject for check in value_checks(Registry("reference"))}
    served = {kernel for operation in operations for kernel in kernels_of(operation)}
    assert served == {path.stem for path in kernel_folder().glob("*.metal")}


def test_an_operation_is_named_with_the_kernels_that_its_name_does_not_say():
    assert with_kernels("topk") == "topk (topk_chunk, topk_merge)"
    assert with_kernels("sliding_attention") == (
        "sliding_attention (sliding_attention, attention_merge)"
    )
    assert with_kernels("selector") == "selector"
    assert with_kernels("topk_chunk") == "topk_chunk"
