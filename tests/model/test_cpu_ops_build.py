"""How the C++ operators come to be, in processes of their own: a library once loaded stays."""

import fcntl
import hashlib
import os
import platform
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.operators import need_operators

ROOT = Path(__file__).parents[2]
LOAD = (
    "import logging, os, pathlib, sys, torch\n"
    "from engine.model.cpu_ops.build import load_operators\n"
    "logging.basicConfig(level=logging.INFO, format='%(message)s')\n"
    "folder, *compilers = sys.argv[1:]\n"
    "found = []\n"
    "for place, compiler in zip((folder, f'{folder}/elsewhere'), compilers):\n"
    "    os.environ['CXX'] = compiler\n"
    "    found.append(load_operators(pathlib.Path(place)) is not None)\n"
    "print(*found)\n"
)
LOAD_PREBUILT = (
    "import logging, pathlib, sys, torch\n"
    "from engine.model.cpu_ops.build import load_operators\n"
    "logging.basicConfig(level=logging.INFO, format='%(message)s')\n"
    "operators = load_operators(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))\n"
    "print(operators.rms_norm(torch.full((1, 4), 2.0), torch.ones(4), 0.0).tolist())\n"
    "print(*torch.ops.loaded_libraries)\n"
)
# Stands in for a compiler: notes each call, takes its time, and hands out a library that is there already.
COMPILER = """#!/bin/sh
echo called $* >> {notes}
sleep 0.3
while [ "$1" != "-o" ]; do shift; done
cp {library} "$2"
"""


def start(cache_dir: Path, compiler: str, later_compiler: str | None = None) -> subprocess.Popen[str]:
    """A process that loads the operators twice, the second time from another folder."""
    command = [sys.executable, "-c", LOAD, str(cache_dir), compiler, later_compiler or compiler]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def load(cache_dir: Path, compiler: str, later_compiler: str | None = None) -> tuple[str, str]:
    out, log = start(cache_dir, compiler, later_compiler).communicate(timeout=60)
    return out.strip(), log


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    script = tmp_path / "compiler"
    script.write_text(COMPILER.format(notes=tmp_path / "notes", library=own_library()))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def own_library() -> Path:
    """The one that this process has loaded."""
    need_operators()
    import torch

    libraries = map(Path, torch.ops.loaded_libraries)
    return next(path for path in libraries if path.name.startswith("operators-"))


def test_it_is_built_once_and_kept(tmp_path: Path, compiler: Path) -> None:
    out, log = load(tmp_path / "cache", str(compiler))
    assert out == "True True"
    assert "building the C++ operators, once" in log
    assert len((tmp_path / "notes").read_text().splitlines()) == 2  # Compiles, then links.
    out, log = load(tmp_path / "cache", "/nowhere/c++")
    assert (out, log) == ("True True", "")


def test_of_several_processes_one_builds(tmp_path: Path, compiler: Path) -> None:
    processes = [start(tmp_path / "cache", str(compiler)) for _ in range(2)]
    for process in processes:
        assert process.communicate(timeout=60)[0].strip() == "True True"
    assert len((tmp_path / "notes").read_text().splitlines()) == 2
    left = [path.name for path in (tmp_path / "cache/operators").iterdir() if not path.name.endswith(".lock")]
    assert len(left) == 1


def test_whoever_waits_for_another_process_says_so(tmp_path: Path, compiler: Path) -> None:
    lock = tmp_path / f"cache/operators/.{own_library().parent.name}.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        process = start(tmp_path / "cache", str(compiler))
        assert process.stderr is not None
        assert process.stderr.readline() == "another process builds the C++ operators; waiting for it\n"
    out, log = process.communicate(timeout=60)
    assert out.strip() == "True True"
    assert log.startswith("building the C++ operators, once")


def test_what_was_built_beforehand_needs_no_compiler_and_no_folder_to_write_to(
    tmp_path: Path, compiler: Path
) -> None:
    prebuilt = tmp_path / "prebuilt"
    command = [sys.executable, "-m", "engine.model.cpu_ops.build", str(prebuilt)]
    subprocess.run(command, env=os.environ | {"CXX": str(compiler)}, check=True, capture_output=True)
    compiled = [line for line in (tmp_path / "notes").read_text().splitlines() if "operators.cpp" in line]
    levels = [re.findall("-march=[^ ]+", line) for line in compiled]
    libraries = sorted(prebuilt.glob("*/*.so"))
    if platform.machine() == "x86_64":
        assert levels == [[], ["-march=x86-64-v3"], ["-march=x86-64-v4"]]
    assert len(libraries) == len(compiled)
    loaded = set()
    for capability in ("default", "avx2"):
        # As in an image: nothing to build with, and a cache that cannot be written to.
        environment = {"PATH": "/nowhere", "ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": str(ROOT)}
        load = [sys.executable, "-c", LOAD_PREBUILT, "/proc/nowhere", str(prebuilt)]
        done = subprocess.run(load, env=environment, capture_output=True, text=True, check=True)
        result, place = done.stdout.split("\n", 1)
        assert (result, done.stderr) == ("[[1.0, 1.0, 1.0, 1.0]]", "")
        loaded.add(Path(place.strip()))
    assert len(loaded) == (2 if platform.machine() == "x86_64" else 1)
    assert loaded <= {*libraries}


def test_without_a_compiler_that_works_there_are_none_and_the_log_says_why(tmp_path: Path) -> None:
    out, log = load(tmp_path / "cache", "/nowhere/c++", "false --nothing")
    assert out == "False False"
    assert log.count("steps run without the C++ operators and take longer") == 2
    missing, failing = (line for line in log.splitlines() if "steps run without" in line)
    assert "there is no C++ compiler" in missing
    assert "failed to build them" in failing


def put(cache_dir: Path, content: bytes, digest: bytes | None) -> Path:
    """A library as an earlier start may have left it."""
    own = own_library()
    library = cache_dir / "operators" / own.parent.name / own.name
    library.parent.mkdir(parents=True)
    library.write_bytes(content)
    if digest is not None:
        library.with_suffix(".sha256").write_bytes(digest)
    return library


ANEW = "building the C++ operators anew, those there cannot be loaded"


@pytest.mark.parametrize(
    "kind", ["cut off", "changed", "of unknown origin", "of an unreadable origin", "for another machine"]
)
def test_a_library_that_cannot_be_loaded_is_built_anew(tmp_path: Path, compiler: Path, kind: str) -> None:
    whole = own_library().read_bytes()
    built = hashlib.sha256(whole).hexdigest().encode()
    foreign = b"not a library, but as it was built " * 9
    states: dict[str, tuple[bytes, bytes | None, str]] = {
        "cut off": (whole[: len(whole) // 2], built, "is not as it was built"),
        "changed": (whole[:-1] + bytes([whole[-1] ^ 1]), built, "is not as it was built"),
        "of unknown origin": (whole, None, "No such file or directory"),
        "of an unreadable origin": (whole, b"\x80" * 64, "is not as it was built"),
        "for another machine": (foreign, hashlib.sha256(foreign).hexdigest().encode(), "invalid ELF header"),
    }
    content, digest, reason = states[kind]
    library = put(tmp_path / "cache", content, digest)
    out, log = load(tmp_path / "cache", str(compiler), "/nowhere/c++")
    assert out == "True True"
    said, building, done = log.splitlines()
    assert said.startswith(f"{ANEW}: ")
    assert reason in said
    assert (building[:30], done[:27]) == ("building the C++ operators, on", "built the C++ operators in ")
    assert library.read_bytes() == whole


def test_of_several_processes_one_builds_anew(tmp_path: Path, compiler: Path) -> None:
    library = put(tmp_path / "cache", own_library().read_bytes(), hashlib.sha256().hexdigest().encode())
    processes = [start(tmp_path / "cache", str(compiler)) for _ in range(2)]
    for process in processes:
        assert process.communicate(timeout=60)[0].strip() == "True True"
    assert len((tmp_path / "notes").read_text().splitlines()) == 2
    assert library.with_suffix(".sha256").read_text() != hashlib.sha256().hexdigest()
    assert load(tmp_path / "cache", "/nowhere/c++") == ("True True", "")


def test_if_it_cannot_be_built_anew_steps_run_without(tmp_path: Path) -> None:
    put(tmp_path / "cache", b"not a library", None)
    out, log = load(tmp_path / "cache", "/nowhere/c++")
    assert out == "False False"
    assert log.count(ANEW) == 1
    assert log.count("steps run without the C++ operators and take longer: there is no C++ compiler") == 2


def test_what_is_built_anew_and_cannot_be_loaded_either_is_not_built_again(
    tmp_path: Path, compiler: Path
) -> None:
    compiler.write_text(COMPILER.format(notes=tmp_path / "notes", library="/bin/sh"))
    put(tmp_path / "cache", b"not a library", None)
    out, log = load(tmp_path / "cache", str(compiler), "/nowhere/c++")
    assert out == "False False"
    assert log.count("building the C++ operators, once") == 1
    assert log.count("steps run without the C++ operators and take longer: Could not load this library") == 1


def test_a_prebuilt_library_that_cannot_be_loaded_is_built_in_the_cache(
    tmp_path: Path, compiler: Path
) -> None:
    put(tmp_path / "image", b"not a library", None)
    place = [str(tmp_path / "cache"), str(tmp_path / "image/operators")]
    done = subprocess.run(
        [sys.executable, "-c", LOAD_PREBUILT, *place],
        env=os.environ | {"CXX": str(compiler)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(tmp_path / "cache/operators") in done.stdout
    assert ANEW in done.stderr
    assert "building the C++ operators, once" in done.stderr
