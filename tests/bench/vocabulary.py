"""How much of texts a draft vocabulary covers: ids from 0 up to a size, and what each text has said before.

    python -m tests.bench.vocabulary --model M [--sizes 16384,32768] FILE ...

Every file is a text of its own; of a .jsonl file every line is. Shares are of all tokens of all texts. A
token counts as said before if its panel of ids holds an earlier token of its text: what draft models keep.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from engine.config import ModelConfig
from engine.model.panel_linear import PANEL
from engine.model.reading import read_tokenizer
from engine.model.sources import ModelSources


def main() -> None:
    """Counts."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.vocabulary", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", default=ModelConfig().model)
    parser.add_argument("--sizes", type=numbers, default=[16384, 32768, 49152, 65536])
    parser.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    config = ModelConfig(model=options.model)
    tokenizer = read_tokenizer(ModelSources.of(config).find(config.model, None), config)
    assert tokenizer is not None, "a model with a tokenizer"
    texts = [
        tokenizer.encode(text, add_special_tokens=False) for path in options.files for text in read(path)
    ]
    total = sum(map(len, texts))
    lines = [
        f"{total} tokens of {len(texts)} texts, {len(tokenizer)} ids",
        f"{'size':>8}{'by id':>10}{'and said':>10}",
    ]
    for size in options.sizes:
        by_id = sum(token < size for text in texts for token in text)
        said = sum(count_said(text, size) for text in texts)
        lines.append(f"{size:8}{by_id / total:10.4f}{(by_id + said) / total:10.4f}")
    sys.stdout.write("\n".join(lines) + "\n")


def count_said(text: list[int], size: int) -> int:
    """Tokens that are not among the first ids, but near an earlier one."""
    panels: set[int] = set()
    count = 0
    for token in text:
        if token >= size:
            count += token // PANEL in panels
            panels.add(token // PANEL)
    return count


def read(path: Path) -> Iterator[str]:
    """The texts of a file: all strings in each line of .jsonl, one below the other."""
    content = path.read_text(errors="replace")
    if path.suffix != ".jsonl":
        yield content
        return
    for line in content.splitlines():
        yield "\n".join(strings(json.loads(line)))


def strings(value: object) -> Iterator[str]:
    """All strings in what JSON holds."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings(inner)


def numbers(text: str) -> list[int]:
    """Numbers with commas between them."""
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
