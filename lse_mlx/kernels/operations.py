"""The operations that kernels serve: one is called by its own name, and may take several kernels."""

from typing import Final

_OF_SEVERAL: Final = (
    ("skinny_qmm", ("skinny_qmm", "skinny_qmm_matrix")),
    ("sliding_attention", ("sliding_attention", "attention_merge")),
    ("topk", ("topk_chunk", "topk_merge")),
    ("verify_attention", ("verify_attention", "attention_merge")),
)


def kernels_of(operation: str) -> tuple[str, ...]:
    """The kernels that serve `operation`, as `metal_kernels/` names them."""
    return dict(_OF_SEVERAL).get(operation, (operation,))


def with_kernels(operation: str) -> str:
    """The operation with its kernels, where its name does not say them all: "topk (topk_chunk,
    topk_merge)"."""
    kernels = kernels_of(operation)
    return operation if kernels == (operation,) else f"{operation} ({', '.join(kernels)})"
