"""Products of two tiles. The matrix units multiply bf16 and add in fp32; two products here are more exact than that."""

from __future__ import annotations

import triton
import triton.language as tl

from monkeyjump.ops.kernels.tiles import INTERPRETED

# Triton's interpreter cannot multiply bf16, so operands are widened there after rounding.
WIDENED = tl.constexpr(INTERPRETED)


@triton.jit
def product(a, b):
    """a b, accumulated in fp32."""
    if WIDENED:
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        result = tl.dot(a, b, input_precision="ieee")
    return result


@triton.jit
def halves(value, dtype: tl.constexpr):
    """fp32 as two numbers of a narrower type, the second the error of the first: 16 bits of mantissa in bf16."""
    high = value.to(dtype)
    return high, (value - high.to(tl.float32)).to(dtype)


@triton.jit
def precise_product(a, b, NARROW: tl.constexpr):
    """a b for b fp32. bf16, which has the range of fp32, multiplies both halves of b; other types are widened."""
    if NARROW:
        high, low = halves(b, a.dtype)
        result = product(a, high) + product(a, low)
    else:
        result = product(a.to(tl.float32), b)
    return result


@triton.jit
def fp32_product(a, b, NARROW: tl.constexpr):
    """a b for both fp32, by their halves where what becomes of it is bf16; the product of both errors is left out."""
    if NARROW:
        high, low = halves(a, tl.bfloat16)
        result = precise_product(high, b, True) + product(low, b.to(tl.bfloat16))
    else:
        result = product(a, b)
    return result
