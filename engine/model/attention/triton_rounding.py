"""How the Triton kernels round what they write: bit by bit as `narrowed` in kv_cache.py does."""

import triton
import triton.language as tl


@triton.jit
def narrowed_numbers(new: tl.tensor, KIND: tl.constexpr, LIMIT: tl.constexpr) -> tl.tensor:
    """Numbers in the type of a cache.

    Finite ones that it has no room for become its largest. What is infinite or not a number stays so.

    Args:
        new: The numbers.
        KIND: The cache's type; bytes stand for float8_e4m3fn.
        LIMIT: Its largest number, 0 where it is the type of `new`.
    """
    if LIMIT > 0:
        new = new.to(tl.float32)
        new = tl.where((new > LIMIT) & (new < float("inf")), LIMIT, new)
        new = tl.where((new < -LIMIT) & (new > float("-inf")), -LIMIT, new)
    if tl.uint8 == KIND:
        new = _eight_bits(new)
    return new.to(KIND)


@triton.jit
def _eight_bits(new: tl.tensor) -> tl.tensor:
    """The bytes of numbers in float8_e4m3fn, rounded to nearest, ties to even; an infinity is not a number.

    By hand: a GPU would make 448 of an infinity, and the interpreter cuts off what it should round. A byte is
    a sign, 4 bits of exponent with a bias of 7, and 3 of mantissa: the upper bits of a float32 but for the
    bias, which is 127 there (Micikevicius et al. 2022, "FP8 formats for deep learning", section 3).

    Args:
        new: float32, at most 448 if finite.
    """
    bits = new.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # The least bit that is kept goes up where more than half of it is cut off, or half and it is odd.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2^-6 numbers are multiples of 2^-9, to which a float32 rounds what is added to 2^14.
    small = (tl.abs(new) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    number = tl.where(size < 0x3C800000, small, normal)
    number = tl.where(size >= 0x7F800000, 0x7F, number)
    return number | ((bits >> 24) & 0x80)
