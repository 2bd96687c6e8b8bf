"""The shape of the code: who may import whom, what stays free of torch, and how long things may get."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 50

# Imports go upwards only: what stands in a row may use the rows above it, never its neighbours.
ENGINE_LAYERS = (
    ("errors", "chat_options", "infill"),
    ("sampling_params", "chat_template", "section"),
    ("token_tree", "tree_config", "planning"),
    ("acceptance", "grammar"),
    ("drafting_config",),
    ("head_config",),
    ("config", "outputs", "catalog"),
    ("client",),
    ("core", "model", "sampling", "inquiry"),
    ("tokenizer",),
    ("detokenizer",),
    ("speculation", "output_processor", "admission", "prompt_logprobs", "step_recorder", "step_timer"),
    ("drafting", "profiler", "calibration", "step_rows", "graph_reserve", "inbox", "watchdog"),
    ("engine_core", "commands"),
    ("async_engine", "speculation_probe"),
    ("factory",),
    ("llm", "inspection"),
    ("training",),
)
# The same for the benchmark, which is a client: of the rest it knows the settings and nothing of the serving.
BENCH_LAYERS = (
    ("statistics", "prompts", "font", "local", "parts", "values"),
    ("asking", "records", "png"),
    ("client", "plan", "progress", "chart"),
    ("load",),
    ("summary",),
    ("paired",),
    ("divergence",),
    ("measuring",),
    ("report", "plot"),
    ("command",),
)
SEEN_BY_BENCH = {"engine.errors", "server", "server.config", "server.options"}
# And for the verification, which is a client of a server or builds engines of its own, in one place.
VERIFY_LAYERS = (
    ("chi_square", "cases", "methods", "plan", "results", "subject"),
    ("law", "comparing", "over_http", "in_process"),
    ("texts", "report"),
    ("draws",),
    ("running",),
    ("command",),
)
SEEN_BY_VERIFY = SEEN_BY_BENCH | {
    "engine.config",
    "engine.sampling_params",
    "server.log_setup",
    *(f"server.bench.{name}" for name in ("asking", "client", "progress", "prompts", "records", "values")),
}
# And for the training of heads, which happens in the engine and is told and shown here.
TRAINING_LAYERS = (
    ("plan", "curves", "progress"),
    ("in_process",),
    ("command",),
)
SEEN_BY_TRAINING = SEEN_BY_BENCH | {
    "engine.config",
    "server.log_setup",
    "server.bench.chart",
    "server.bench.values",
}
SEEN_BY_SERVER = {
    "errors",
    "chat_options",
    "infill",
    "acceptance",
    "section",
    "config",
    "sampling_params",
    "outputs",
    "planning",
    "client",
    "catalog",
}
# Who may build an engine, and who alone may use them.
COMPOSITION_ROOTS = {
    "server.serve": "server.cli",
    "server.training.in_process": "server.training.command",
    "server.verify.in_process": "server.verify.command",
}
# The bookkeeping and the server: testable without torch, importable in no time.
TORCH_FREE = (
    "server",
    "engine.core",
    *(f"engine.{name}" for name in sorted(SEEN_BY_SERVER | {"token_tree"})),
)


@dataclass(frozen=True, slots=True)
class Module:
    """A source file.

    Attributes:
        name: Its dotted name.
        path: Its file.
        tree: What is in it.
        imports: Dotted names it imports, anywhere in it; `from a import b` is a.b if that is a module.
    """

    name: str
    path: Path
    tree: ast.Module
    imports: frozenset[str]

    @property
    def layer(self) -> str:
        """Its package or module right below engine or server."""
        return self.name.split(".")[1] if "." in self.name else ""


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            base = node.module or ""
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield name if is_module(name) else base


def read_modules() -> dict[str, Module]:
    modules = {}
    for package in ("engine", "server"):
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text("utf-8"))
            module = Module(dotted(path), path, tree, frozenset(imported(tree)))
            modules[module.name] = module
    return modules


MODULES = read_modules()


def own(names: frozenset[str], package: str) -> set[str]:
    return {name for name in names if name.split(".")[0] == package}


def is_in(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_every_part_of_the_engine_has_its_place() -> None:
    placed = [name for row in ENGINE_LAYERS for name in row]
    assert len(placed) == len(set(placed))
    present = {module.layer for module in MODULES.values() if module.name.startswith("engine.")}
    assert present == set(placed)


def test_the_engine_imports_upwards_only() -> None:
    height = {name: row for row, names in enumerate(ENGINE_LAYERS) for name in names}
    faults = [
        f"{module.name} imports {name}"
        for module in MODULES.values()
        if module.name.startswith("engine.")
        for name in own(module.imports, "engine")
        if name.split(".")[1:2] != [module.layer]
        if "." not in name or height[name.split(".")[1]] >= height[module.layer]
    ]
    assert faults == []


def test_the_engine_knows_nothing_of_the_server() -> None:
    web = ("server", "fastapi", "starlette", "uvicorn", "prometheus_client")
    faults = [
        f"{module.name} imports {name}"
        for module in MODULES.values()
        if module.name.startswith("engine")
        for name in module.imports
        if is_in(name, web)
    ]
    assert faults == []


def test_the_server_sees_only_the_engines_face() -> None:
    faults = [
        f"{module.name} imports {name}"
        for module in MODULES.values()
        if module.name.startswith("server") and module.name not in COMPOSITION_ROOTS
        for name in own(module.imports, "engine")
        if name.split(".")[1:2] == [] or name.split(".")[1] not in SEEN_BY_SERVER
    ]
    assert faults == []


@pytest.mark.parametrize("root", COMPOSITION_ROOTS)
def test_only_a_command_knows_a_composition_root(root: str) -> None:
    users = {module.name for module in MODULES.values() if root in module.imports}
    assert users == {COMPOSITION_ROOTS[root]}


@pytest.mark.parametrize(
    ("package", "layers", "seen"),
    [
        ("server.bench", BENCH_LAYERS, SEEN_BY_BENCH),
        ("server.verify", VERIFY_LAYERS, SEEN_BY_VERIFY),
        ("server.training", TRAINING_LAYERS, SEEN_BY_TRAINING),
    ],
)
def test_a_client_imports_upwards_only_and_knows_no_part_of_the_serving(
    package: str, layers: tuple[tuple[str, ...], ...], seen: set[str]
) -> None:
    height = {f"{package}.{name}": row for row, names in enumerate(layers) for name in names}
    modules = [module for module in MODULES.values() if is_in(module.name, (package,))]
    assert {module.name for module in modules} == {*height, package}
    faults = [
        f"{module.name} imports {name}"
        for module in modules
        if module.name not in COMPOSITION_ROOTS
        for name in own(module.imports, "engine") | own(module.imports, "server")
        if name not in seen and height.get(name, len(height)) >= height[module.name]
    ]
    assert faults == []


@pytest.mark.parametrize(
    ("package", "users"),
    [
        ("server.bench", ("server.cli", "server.verify", "server.training")),
        ("server.verify", ("server.cli",)),
        ("server.training", ("server.cli",)),
    ],
)
def test_only_commands_know_the_clients(package: str, users: tuple[str, ...]) -> None:
    found = {
        module.name
        for module in MODULES.values()
        if not is_in(module.name, (package,))
        if any(is_in(name, (package,)) for name in module.imports)
    }
    assert [name for name in found if not is_in(name, users)] == []


def test_no_modules_import_each_other() -> None:
    graph = {
        module.name: {name for name in module.imports if name in MODULES and name != module.name}
        for module in MODULES.values()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def test_packages_export_nothing() -> None:
    """Importing engine.config must not load torch by way of a package's __init__."""
    faults = [
        module.name
        for module in MODULES.values()
        if module.path.name == "__init__.py" and module.imports - {"typing"}
    ]
    assert faults == []


@pytest.mark.parametrize("banned", ["torch", "transformers", "numpy"])
def test_bookkeeping_and_server_do_not_mention_tensors(banned: str) -> None:
    faults = [
        f"{module.name} imports {name}"
        for module in MODULES.values()
        if is_in(module.name, TORCH_FREE)
        for name in module.imports
        if is_in(name, (banned,))
    ]
    assert faults == []


def test_numbers_reach_a_device_without_a_wait() -> None:
    """A tensor made there of ordinary memory waits for all that was launched: `upload` does not."""
    faults = [
        f"{module.name}, line {node.lineno}"
        for module in MODULES.values()
        if is_in(module.name, ("engine.sampling", "engine.speculation"))
        and module.name != "engine.sampling.uploading"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.tensor"
        if any(keyword.arg == "device" for keyword in node.keywords)
    ]
    assert faults == []


def test_bookkeeping_has_no_clock_no_thread_and_no_asyncio() -> None:
    faults = [
        f"{module.name} imports {name}"
        for module in MODULES.values()
        if is_in(module.name, ("engine.core",))
        for name in module.imports & {"time", "datetime", "threading", "asyncio"}
    ]
    assert faults == []
    users = {module.name for module in MODULES.values() if "asyncio" in module.imports}
    assert {name for name in users if name.startswith("engine")} == {"engine.async_engine", "engine.inbox"}


@pytest.mark.parametrize(
    "package",
    [
        "server.app",
        "server.cli",
        "server.bench",
        "server.verify",
        "server.training",
        "engine.core",
        "engine.client",
        "engine.catalog",
    ],
)
def test_it_can_be_imported_without_torch(package: str) -> None:
    names = [name for name in MODULES if is_in(name, (package,)) and name not in COMPOSITION_ROOTS]
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "sys.exit(', '.join({'torch', 'transformers', 'numpy'} & set(sys.modules)) or None)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *names], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{package} loads {done.stderr}"


def test_files_are_short() -> None:
    lengths = {module.name: len(module.path.read_text("utf-8").splitlines()) for module in MODULES.values()}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function; of a Triton kernel those that do something: it has no objects to take them from,
    so that its arguments alone fill a page."""
    is_kernel = any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list)
    begin = node.body[ast.get_docstring(node) is not None].lineno if is_kernel else node.lineno
    return (node.end_lineno or begin) - begin + 1


def test_functions_are_short() -> None:
    lengths = {
        f"{module.name}.{node.name}": length(node)
        for module in MODULES.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}
