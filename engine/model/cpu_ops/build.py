"""Builds the operators with the machine's own C++ compiler, once, and loads them.

The library lies in the cache folder under a key of everything that decides what it is: the sources, the
compiler's flags, the instruction set, torch and the C library. Processes and machines may share the folder.
A library that cannot be loaded all the same, or is not as it was built, is built anew.

    python -m engine.model.cpu_ops.build [FOLDER]

builds them beforehand, for every instruction set, and by default beside this file, where they are looked for
first: so an image has them without having a compiler.
"""

import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from engine.model.weight_cache import WeightCache

logger = logging.getLogger(__name__)

_NAMESPACE = "outrider"
_HEADERS = (
    *("attention.h", "batch_attention.h", "elementwise.h", "entries.h", "few_bits.h", "heads.h", "int8.h"),
    *("lanes.h", "layers.h", "panels.h", "room.h", "sampling.h", "six_bits.h", "six_steps.h", "steps.h"),
    *("team.h", "threads.h", "truncation.h"),
)
_FILES = ("operators.cpp", *_HEADERS)
_FLAGS = (
    "-O3",
    "-std=c++20",
    "-fPIC",
    "-pthread",
    # Not -ffast-math: sums must keep their order, and not-a-number must stay what it is.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    f"-DOUTRIDER_NAMESPACE={_NAMESPACE}",
)
# Levels of the x86-64 ABI, not -march=native: the same key then means the same library on every machine.
_INSTRUCTION_SETS = {"DEFAULT": (), "AVX2": ("-march=x86-64-v3",), "AVX512": ("-march=x86-64-v4",)}

_DIGEST = ".sha256"
"""What the file beside a library ends in that says how it was built."""

PREBUILT = Path(__file__).parent / "prebuilt"
"""What was built beforehand; nothing is written there while a server runs."""


class CannotBuild(Exception):
    """Why there are no operators."""


@dataclass(frozen=True, slots=True)
class CpuOperators:
    """The operators, ready to call. Their arguments are described in operators.cpp.

    Attributes:
        attend: Stores a layer's keys and values and attends.
        linear_fp16: A linear layer on weights packed as float16.
        linear_packed: A linear layer on weights packed as integers of 8, 6, 5 or 4 bits with scales.
        find_steps: The numbers of four or five bits that weights were made of.
        find_six_bits: Those of six bits.
        rms_norm: RMSNorm over the last dimension.
        gate_silu, gate_gelu_tanh: The activation of a gated feed-forward layer.
        rotate: Rotary positions for queries and keys that come from one matrix.
        hold_layers: All decoder layers of a model with their caches, for `run_layers`.
        run_layers: A pass through them, and what goes into wanted ones.
        use_threads: How many threads work for the calling one; 0 is as many as would for torch.
        truncate_rows: Temperature, top_k, top_p and min_p on rows of logits.
        choose_rows: The token of rows of logits, truncated or greedy, under keyed Gumbel noise.
        top_rows: The highest entries of rows of logits under keyed Gumbel noise.
        run_head: A pass of an EAGLE head.
        draft_chains: Chains of an EAGLE head's drafts.
    """

    attend: Any
    linear_fp16: Any
    linear_packed: Any
    find_steps: Any
    find_six_bits: Any
    rms_norm: Any
    gate_silu: Any
    gate_gelu_tanh: Any
    rotate: Any
    hold_layers: Any
    run_layers: Any
    use_threads: Any
    truncate_rows: Any
    choose_rows: Any
    top_rows: Any
    run_head: Any
    draft_chains: Any


def load_operators(cache_dir: Path, prebuilt: Path = PREBUILT) -> CpuOperators | None:
    """The operators, built first if they have not been.

    Args:
        cache_dir: Built libraries are kept in its folder "operators".
        prebuilt: Folder of libraries that were built beforehand.

    Returns:
        None, with the reason in the log, where there is no compiler, or it fails, or what it
        makes cannot be loaded.
    """
    flags = _flags()
    key = _key(flags)
    if f"{key}.so" not in {Path(path).name for path in torch.ops.loaded_libraries}:
        try:
            _load(prebuilt, cache_dir / "operators", flags)
        except (OSError, CannotBuild) as error:
            reason = error if error.__cause__ is None else f"{error}: {error.__cause__}"
            logger.warning("steps run without the C++ operators and take longer: %s", reason)
            return None
    operators = getattr(torch.ops, _NAMESPACE)
    names = [field.name for field in fields(CpuOperators)]
    return CpuOperators(**{name: getattr(operators, name).default for name in names})


def build_all(folder: Path) -> None:
    """Builds the operators for every instruction set that machines of this kind may have.

    Args:
        folder: Where they go; give it to `load_operators`.

    Raises:
        CannotBuild: There is no compiler, or it fails.
    """
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    for instructions in _INSTRUCTION_SETS.values() if is_x86 else [()]:
        _build(folder, (*_FLAGS, *instructions))


def _load(prebuilt: Path, folder: Path, flags: tuple[str, ...]) -> None:
    """Loads what was built, or builds it; what cannot be loaded is replaced, once."""
    key = _key(flags)
    for place in (prebuilt, folder):
        if (built := WeightCache(place).get(key)) is not None:
            try:
                _open(built / f"{key}.so")
                return
            except OSError as error:
                reason = error.__cause__ or error
                logger.warning("building the C++ operators anew, those there cannot be loaded: %s", reason)
    _open(_build(folder, flags, is_kept=_opens) / f"{key}.so")


def _opens(library: Path) -> bool:
    """Whether another process has replaced it by now."""
    try:
        _open(library)
    except OSError:
        return False
    return True


def _open(library: Path) -> None:
    """Loads a library that is as it was built: of one that was cut off, the missing pages end the process.

    Raises:
        OSError: It is not, or the system cannot load it.
    """
    if library.with_suffix(_DIGEST).read_bytes() != _digest_of(library).encode():
        raise OSError(f"{library} is not as it was built")
    torch.ops.load_library(library)  # type: ignore[no-untyped-call]


def _build(
    folder: Path, flags: tuple[str, ...], is_kept: Callable[[Path], bool] = lambda library: True
) -> Path:
    """The folder with the library; of several processes one builds it and the others wait."""
    key = _key(flags)
    cache = WeightCache(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / f".{key}.lock"):
        built = cache.get(key)
        if built is not None and not is_kept(built / f"{key}.so"):
            cache.drop(key)
        return cache.put(key, lambda scratch: _compile(scratch / f"{key}.so", flags))


def _compile(library: Path, flags: tuple[str, ...]) -> None:
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    if shutil.which(compiler[0]) is None:
        raise CannotBuild(f"there is no C++ compiler {compiler[0]!r} to build them with (set CXX to yours)")
    logger.info("building the C++ operators, once (about half a minute)")
    began = time.perf_counter()
    torch_folder, here = Path(torch.__file__).parent, Path(__file__).parent
    compiled = library.with_suffix(".o")
    headers = (torch_folder / "include", torch_folder / "include/torch/csrc/api/include")
    includes = [f"-I{folder}" for folder in headers]
    _run([*compiler, *flags, *includes, "-c", str(here / "operators.cpp"), "-o", str(compiled)])
    libraries = [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"]
    _run([*compiler, "-shared", str(compiled), *libraries, "-o", str(library)])
    compiled.unlink()
    library.with_suffix(_DIGEST).write_text(_digest_of(library))
    logger.info("built the C++ operators in %.0f seconds", time.perf_counter() - began)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last_lines = " / ".join(done.stderr.strip().splitlines()[-5:])
        raise CannotBuild(f"{command[0]} failed to build them: {last_lines}")


def _digest_of(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _flags() -> tuple[str, ...]:
    """Those for this machine."""
    return (*_FLAGS, *_INSTRUCTION_SETS.get(torch.backends.cpu.get_cpu_capability(), ()))


def _key(flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else ""
    for part in (*flags, _DIGEST, torch.__version__, platform.machine(), platform.system(), libc):
        digest.update(f"{part}\n".encode())
    for name in _FILES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return f"operators-{digest.hexdigest()[:16]}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock that the system takes back if this process dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process builds the C++ operators; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    build_all(Path(sys.argv[1]) if len(sys.argv) > 1 else PREBUILT)
