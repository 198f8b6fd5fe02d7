"""Affine 4-bit quantization as MLX stores it: fake, packed and unpacked.

A matrix row is cut into groups of 64 values; a group keeps a scale, a bias and one 4-bit code for
each value, and stands for ``code * scale + bias``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 64
BITS = 4
CODES_PER_WORD = 32 // BITS


class Quantized(NamedTuple):
    """One matrix: integer codes ``[rows, columns]``, scales and biases ``[rows, columns / 64]``."""

    codes: Tensor
    scales: Tensor
    biases: Tensor


def quantize(weight: Tensor, scale_dtype: torch.dtype = torch.bfloat16) -> Quantized:
    """Quantize ``[rows, columns]``; the codes are chosen for the scales as they will be stored.

    The edge of the group with the larger magnitude becomes the bias and is met exactly, and zero
    stays on the grid (the rule of ``mlx.core.quantize``).
    """
    rows, columns = weight.shape
    groups = weight.detach().float().reshape(rows, columns // GROUP, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    steps = 2**BITS - 1
    scale = ((high - low) / steps).clamp_min(1e-7)
    low_is_edge = low.abs() > high.abs()
    scale = torch.where(low_is_edge, scale, -scale)
    edge = torch.where(low_is_edge, low, high)
    edge_code = torch.round(edge / scale)
    on_grid = edge_code != 0
    scale = torch.where(on_grid, edge / torch.where(on_grid, edge_code, 1.0), scale)
    bias = torch.where(on_grid, edge, 0.0)
    scale, bias = scale.to(scale_dtype), bias.to(scale_dtype)
    codes = torch.round((groups - bias.float()[..., None]) / scale.float()[..., None])
    return Quantized(codes.clamp(0, steps).reshape(rows, columns), scale, bias)


def dequantize(quantized: Quantized) -> Tensor:
    """The fp32 matrix ``[rows, columns]`` that the codes stand for."""
    rows, columns = quantized.codes.shape
    groups = quantized.codes.float().reshape(rows, columns // GROUP, GROUP)
    values = groups * quantized.scales.float()[..., None] + quantized.biases.float()[..., None]
    return values.reshape(rows, columns)


def fake_quantize(weight: Tensor) -> Tensor:
    """The rounded values in the forward pass, the identity in the backward pass."""
    with torch.no_grad():
        change = dequantize(quantize(weight)) - weight
    return weight + change


def pack(codes: Tensor) -> Tensor:
    """Codes ``[rows, columns]`` to ``uint32 [rows, columns / 8]``, the first code lowest."""
    rows, columns = codes.shape
    parts = codes.to(torch.int64).reshape(rows, columns // CODES_PER_WORD, CODES_PER_WORD)
    shifts = torch.arange(0, 32, BITS, device=codes.device)
    return (parts << shifts).sum(-1).cpu().to(torch.uint32)


def unpack(words: Tensor) -> Tensor:
    """``uint32 [rows, words]`` back to codes ``[rows, 8 * words]`` (int64)."""
    shifts = torch.arange(0, 32, BITS)
    codes = (words.cpu().to(torch.int64)[..., None] >> shifts) & (2**BITS - 1)
    return codes.flatten(1)
