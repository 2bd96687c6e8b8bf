"""The server is free of the engine's inside: it starts fast, and anything may stand behind EngineClient."""

import subprocess
import sys

SCRIPT = """
import sys
import server.app
loaded = {name.partition(".")[0] for name in sys.modules}
print(sorted(loaded & {"torch", "transformers", "tokenizers", "numpy"}))
engine = {name for name in sys.modules if name.startswith("engine.")}
allowed = ("errors", "sampling_params", "token_tree", "acceptance", "outputs", "client", "config")
allowed += ("chat_options", "infill", "planning")
print(sorted(engine - {f"engine.{name}" for name in allowed}))
"""


def test_server_app_loads_neither_torch_nor_the_engine() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert run.stdout.split("\n")[:2] == ["[]", "[]"]
