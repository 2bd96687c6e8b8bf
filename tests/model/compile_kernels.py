"""Compiles the Triton kernels to machine code for GPUs that need not be there, and prints their names.

    python -m tests.model.compile_kernels 80:bf16 89:fp8e4nv

The arguments are a GPU's compute capability without its dot, and the cache's type as Triton calls it. Every
branch of the kernels is on, in bfloat16 and with the head sizes of an 8B model.
"""

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.model.attention import triton_kernels as kernels
from engine.model.attention.tiles import MAX_SPLITS

TYPES = {
    "*bf16": ("query", "key", "value", "out", "sinks"),
    "*fp32": ("partial_out", "partial_weight"),
    "*i32": ("tiles", "merges"),
    "*i64": ("slots", "context", "context_positions", "positions", "visible", "ancestors"),
    "fp32": ("scale", "softcap"),
}
CONSTANTS = {
    "NUM_HEADS": 8,
    "GROUP": 4,
    "KEY_DIM": 128,
    "VALUE_DIM": 128,
    "BLOCK_H": 8,
    "BLOCK_M": 64,
    "BLOCK_N": 64,
    "BLOCK_K": 128,
    "BLOCK_V": 128,
    "BLOCK_S": MAX_SPLITS,
    "HAS_TREES": True,
    "HAS_WINDOW": True,
    "HAS_SOFTCAP": True,
    "HAS_SINKS": True,
    "WIDE_DOTS": False,
}
LIMITS = {"fp16": 65504.0, "fp8e4nv": 448.0}


def compile_kernel(kernel: Any, capability: int, cache_type: str) -> Any:
    """What Triton makes of a kernel; raises where it is refused."""
    types = {name: kind for kind, names in TYPES.items() for name in names}
    # Numbers of eight bits are written as bytes.
    kept = "u8" if kernel is kernels.store and cache_type == "fp8e4nv" else cache_type
    types |= dict.fromkeys(("keys", "values"), f"*{kept}")
    known = CONSTANTS | {"LIMIT": LIMITS.get(cache_type, 0.0)}
    signature = {}
    constants = {}
    for index, name in enumerate(kernel.arg_names):
        if name in known:
            signature[name] = "constexpr"
            constants[(index,)] = known[name]
        else:
            signature[name] = types.get(name, "i32")
    source = ASTSource(kernel, signature, constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_stages": 3})


def main() -> None:
    """Compiles them all."""
    for case in sys.argv[1:]:
        capability, _, cache_type = case.partition(":")
        for kernel in (kernels.attend, kernels.combine, kernels.store):
            compiled = compile_kernel(kernel, int(capability), cache_type)
            assert compiled.asm["cubin"]
            sys.stdout.write(f"{case} {kernel.__name__}\n")


if __name__ == "__main__":
    main()
