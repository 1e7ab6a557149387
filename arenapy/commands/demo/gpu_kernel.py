"""The checksum of a batch, computed in PTX on the device and in NumPy to check it.

Each 32-bit word is mixed with its place, then goes through as many rounds as are asked for of a
shift, an exclusive or and a multiplication; the sum of what comes out is the batch's checksum. All
of it is modulo 2**32, so the order of the additions does not matter, and the device's sum has to
have the same bits as the one here. A round is one to one: no word that differs gets lost in it.

The driver compiles the PTX: neither nvcc nor its headers are needed.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["NAME", "PTX", "THREADS", "checksum"]

PLACE = 0x9E3779B9  # odd, as every factor here: multiplying by it is one to one
FACTOR = 0x2C1B3C6D
SHIFT = 15
THREADS = 256  # a block
CHUNK = 1 << 14  # words at a time, which stay in cache
MASK = 0xFFFFFFFF

NAME = b"checksum"

#: The words of a batch are dealt to all threads in turn. Each adds up its own, and each warp its
#: threads': one atomic addition for 32 threads, else those would take longer than the rounds.
PTX = f"""
.version 7.0
.target sm_70
.address_size 64

.visible .entry {NAME.decode()}(
    .param .u64 start, .param .u64 words, .param .u32 rounds, .param .u64 sum)
{{
    .reg .pred %p<4>;
    .reg .u32 %r<11>;
    .reg .u64 %d<7>;
    ld.param.u64 %d1, [start];
    ld.param.u64 %d2, [words];
    ld.param.u32 %r1, [rounds];
    ld.param.u64 %d3, [sum];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.u32 %r2, %r2, %r3, %r4;
    mov.u32 %r10, %nctaid.x;
    mul.lo.u32 %r3, %r3, %r10;
    cvt.u64.u32 %d4, %r2;
    cvt.u64.u32 %d5, %r3;
    mov.u32 %r5, 0;
NEXT:
    setp.ge.u64 %p1, %d4, %d2;
    @%p1 bra SUM;
    shl.b64 %d6, %d4, 2;
    add.u64 %d6, %d1, %d6;
    ld.global.u32 %r6, [%d6];
    cvt.u32.u64 %r7, %d4;
    mul.lo.u32 %r7, %r7, {PLACE:#x};
    xor.b32 %r6, %r6, %r7;
    mov.u32 %r8, 0;
ROUND:
    setp.ge.u32 %p2, %r8, %r1;
    @%p2 bra ROUNDED;
    shr.u32 %r9, %r6, {SHIFT};
    xor.b32 %r6, %r6, %r9;
    mul.lo.u32 %r6, %r6, {FACTOR:#x};
    add.u32 %r8, %r8, 1;
    bra ROUND;
ROUNDED:
    add.u32 %r5, %r5, %r6;
    add.u64 %d4, %d4, %d5;
    bra NEXT;
SUM:
    shfl.sync.down.b32 %r9, %r5, 16, 0x1f, 0xffffffff;
    add.u32 %r5, %r5, %r9;
    shfl.sync.down.b32 %r9, %r5, 8, 0x1f, 0xffffffff;
    add.u32 %r5, %r5, %r9;
    shfl.sync.down.b32 %r9, %r5, 4, 0x1f, 0xffffffff;
    add.u32 %r5, %r5, %r9;
    shfl.sync.down.b32 %r9, %r5, 2, 0x1f, 0xffffffff;
    add.u32 %r5, %r5, %r9;
    shfl.sync.down.b32 %r9, %r5, 1, 0x1f, 0xffffffff;
    add.u32 %r5, %r5, %r9;
    and.b32 %r4, %r4, 31;
    setp.ne.u32 %p3, %r4, 0;
    @%p3 bra DONE;
    red.global.add.u32 [%d3], %r5;
DONE:
    ret;
}}
""".encode()


def checksum(words: NDArray[np.uint32], rounds: int) -> int:
    """Return what the kernel computes of `words`, computed by NumPy."""
    total = 0
    place, factor, shift = np.uint32(PLACE), np.uint32(FACTOR), np.uint32(SHIFT)
    scratch: NDArray[Any] = np.empty(CHUNK, np.uint32)
    for start in range(0, words.size, CHUNK):
        mixed = np.arange(start, min(start + CHUNK, words.size)).astype(np.uint32)
        mixed *= place
        mixed ^= words[start : start + CHUNK]
        shifted = scratch[: mixed.size]
        for _ in range(rounds):
            np.right_shift(mixed, shift, out=shifted)
            np.bitwise_xor(mixed, shifted, out=mixed)
            np.multiply(mixed, factor, out=mixed)
        total += int(mixed.sum(dtype=np.uint64))
    return total & MASK
