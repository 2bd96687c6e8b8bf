"""Outrider beside other engines on the same GGUF file, in alternation, in one run.

    python -m tests.bench.peers --model FILE.gguf [--llama-server PATH] [--openvino-python PATH]
        [--transformers] [--draft-model FILE.gguf] [--prompts FILE] [--rounds 2] [--games one,many,first]

Three games: `one` stream of tokens (tokens per second after the first), `many` streams at once (tokens per
second in all, the reading of prompts included), and the `first` token of a long prompt (seconds). Each
question goes to every engine in turn, and who comes first changes; ratios are medians over the questions of
neighbours' ratios, above 1 where Outrider is faster. Greedy, the end of the text is ignored, nothing is
cached between questions. A peer that is not named is left out. llama.cpp's server, OpenVINO GenAI and
transformers have processes of their own, which end with the run.
"""

import argparse
import os
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from server.bench.local import local_server
from server.bench.prompts import Prompt, own_prompts, read_prompts, take
from tests.bench.contestants import (
    Contestant,
    Failed,
    HttpContestant,
    Timing,
    child,
    llama_server,
    own_python,
)

OURS = "outrider"
PLAIN = {"speculation": {"enabled": False}}
UNCACHED = {"cache_prompt": False}
LLAMA_DRAFT = ("--spec-type", "draft-simple", "--spec-draft-n-max", "3")
WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school"),
    *("state", "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week"),
    *("company", "system", "program", "question", "work", "government", "number", "night", "point", "home"),
)


@dataclass(slots=True)
class Game:
    """Something that is compared.

    Attributes:
        title: What it is.
        unit: Of its figures.
        players: Who takes part, Outrider's plain decoding first.
        figures: What each did, question by question.
    """

    title: str
    unit: str
    players: list[Contestant]
    figures: dict[str, list[float]] = field(default_factory=dict)

    @property
    def less_is_better(self) -> bool:
        """Whether figures are seconds and not speeds."""
        return self.unit == "s"


def main() -> int:
    """Runs the games and prints a table of each."""
    options = parse()
    prompts = take(read_prompts(options.prompts) if options.prompts else own_prompts(), options.num_prompts)
    with ExitStack() as stack:
        try:
            games = start(options, stack)
            for game in games.values():
                for player in game.players:
                    player.answer(prompts[:1], 8)  # To warm up.
            if "one" in games:
                play(games["one"], [[prompt] for prompt in prompts], options, lambda t: t.decode_speed)
            if "many" in games:
                group = take(prompts, options.streams)
                play(games["many"], [group], options, lambda t: t.total_speed)
            if "first" in games:
                play(games["first"], [[long_prompt(options.prompt_words)]], options, lambda t: t.first)
        except Failed as failure:
            say(str(failure))
            return 1
    for game in games.values():
        report(game)
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.peers", description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="GGUF file that all of them read")
    parser.add_argument("--draft-model", type=Path, help="GGUF file; adds speculation to ours and llama.cpp")
    parser.add_argument("--speculation", help="method of ours to compare as well, such as ngram")
    parser.add_argument("--llama-server", type=Path, help="the binary")
    parser.add_argument("--openvino-python", help="Python of an environment with openvino-genai")
    parser.add_argument("--transformers", action="store_true", help="generate() in float32, one stream")
    parser.add_argument("--games", default="one,many,first", type=lambda text: text.split(","))
    parser.add_argument("--prompts", type=Path, help="a .json or .jsonl file; default: four of our own")
    parser.add_argument("--num-prompts", type=int, help="default: each once")
    parser.add_argument("--rounds", type=int, default=2, help="how often each question is asked")
    parser.add_argument("--tokens", type=int, default=128, help="per answer")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-words", type=int, default=505, help="words of the long prompt")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    return parser.parse_args()


def start(options: argparse.Namespace, stack: ExitStack) -> dict[str, Game]:
    """Starts everybody; they end with the stack."""
    games = {
        "one": Game("one stream, tokens after the first", "tokens/s", []),
        "many": Game(f"{options.streams} streams at once, prompts included", "tokens/s in all", []),
        "first": Game(f"first token of a prompt of {options.prompt_words} words", "s", []),
    }
    games = {name: game for name, game in games.items() if name in options.games}
    for names, player in players(options, stack):
        for name in names:
            if name in games:
                games[name].players.append(player)
    return games


def players(options: argparse.Namespace, stack: ExitStack) -> list[tuple[tuple[str, ...], Contestant]]:
    """Those who were named, and the games that each takes part in; Outrider first."""
    every, alone = ("one", "many", "first"), ("one", "first")
    settings: dict[str, object] = {"model": options.model, "prefix_caching": False}
    if options.draft_model:
        settings["draft_model"] = options.draft_model
    elif options.speculation:
        settings["speculation"] = options.speculation
    else:
        settings["speculation"] = "none"
    url = f"{stack.enter_context(local_server(settings, None, say))}/v1/"
    found: list[tuple[tuple[str, ...], Contestant]] = [(every, HttpContestant(OURS, url, PLAIN))]
    if settings.get("speculation") != "none":
        found.append((("one", "many"), HttpContestant(f"{OURS}, speculating", url, {})))
    if options.llama_server:
        for slots, names in ((1, alone), (options.streams, ("many",))):
            if set(names) & {*options.games}:
                url = stack.enter_context(
                    llama_server(options.llama_server, options.model, options.threads, slots, ())
                )
                found.append((names, HttpContestant("llama.cpp", url, UNCACHED)))
    if options.llama_server and options.draft_model and "one" in options.games:
        draft = ("-md", str(options.draft_model), *LLAMA_DRAFT)
        url = stack.enter_context(
            llama_server(options.llama_server, options.model, options.threads, 1, draft)
        )
        found.append((("one",), HttpContestant("llama.cpp, speculating", url, UNCACHED)))
    for named, engine, names in (
        (options.openvino_python, "openvino", alone),
        (options.openvino_python, "openvino-batch", ("many",)),
        (options.transformers and own_python(), "transformers", alone),
    ):
        if named and set(names) & {*options.games}:
            label = engine.removesuffix("-batch")
            player = stack.enter_context(child(label, engine, named, options.model, options.threads))
            found.append((names, player))
    return found


def play(
    game: Game,
    questions: Sequence[Sequence[Prompt]],
    options: argparse.Namespace,
    figure: Callable[[Timing], float],
) -> None:
    """Asks everybody every question in turn."""
    turn = 0
    for number in range(options.rounds):
        for asked in questions:
            # Text that nobody has seen: engines that keep prompts find nothing.
            fresh = [long_prompt(options.prompt_words, number)] if game.less_is_better else asked
            order = game.players[turn % len(game.players) :] + game.players[: turn % len(game.players)]
            turn += 1
            for player in order:
                value = figure(player.answer(fresh, 1 + game_tokens(game, options)))
                game.figures.setdefault(player.name, []).append(value)
                say(f"{game.title}: {player.name} {value:.2f} {game.unit}")


def game_tokens(game: Game, options: argparse.Namespace) -> int:
    """Tokens of each answer behind the first; for the first token alone a few are enough."""
    return 1 if game.less_is_better else int(options.tokens) - 1


def long_prompt(num_words: int, seed: int = 0) -> Prompt:
    """A text to be continued, of words that are about a token each, and another one for each seed."""
    chance = random.Random(seed)
    text = " ".join(chance.choice(WORDS) for _ in range(num_words))
    return Prompt(f"words-{seed}", "words", None, f"{seed} {text}")


def report(game: Game) -> None:
    """The table of a game."""
    say(f"\n{game.title}: {game.unit}, median (least to most) and how many times as fast Outrider is")
    ours = game.figures[OURS]
    for name, own in game.figures.items():
        pairs = zip(ours, own, strict=True)
        ratio = statistics.median(b / a if game.less_is_better else a / b for a, b in pairs)
        say(f"  {name:24} {statistics.median(own):8.2f} ({min(own):.2f} to {max(own):.2f})  {ratio:6.2f}")


def say(line: str) -> None:
    """One line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
