"""Whole trainings of tiny heads: resumption, interruption, budgets, and what the finished head drafts."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import ModelConfig
from engine.errors import StartupError
from engine.sampling_params import SamplingParams
from engine.speculation.heads.eagle import EagleHead
from engine.speculation.heads.eagle_reading import read_eagle_head
from engine.speculation.heads.medusa_reading import read_medusa_heads
from engine.speculation.heads.target import TargetShape
from engine.training.locking import locked
from engine.training.running import train_head
from engine.training.schedule import Schedule
from engine.training.settings import Sources, TrainSettings
from engine.training.trainer import Evaluation, StepReport
from tests.engines import build_llm, load_tiny
from tests.tiny import VOCAB_SIZE, save_tiny

HIDDEN = 32


class Watching:
    """Remembers, and wants an end after so many steps."""

    def __init__(self, steps: int | None = None) -> None:
        self.steps: list[StepReport] = []
        self.history: list[Evaluation] = []
        self.stages: list[str] = []
        self._most = steps

    def on_progress(self, stage: str, done: int, total: int) -> None:
        self.stages.append(stage)

    def on_step(self, report: StepReport) -> None:
        self.steps.append(report)

    def on_evaluation(self, history: Sequence[Evaluation]) -> None:
        self.history = list(history)

    def stop(self) -> bool:
        return self._most is not None and len(self.steps) >= self._most


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), num_hidden_layers=4)


@pytest.fixture(scope="module")
def generations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One greedy answer of that model, behind 24 prompts of a letter: alike, and so learnt fast."""
    path = tmp_path_factory.mktemp("data") / "generations.jsonl"
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    [answer] = build_llm(target=load_tiny(num_hidden_layers=4)).generate([[97]], params)
    rows = [
        {
            "id": str(number),
            "prompt_token_ids": [97 + number],
            "output_token_ids": answer.token_ids[: 12 + number % 5],
        }
        for number in range(24)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    return path


def settings(model: Path, generations: Path, out: Path, **changes: Any) -> TrainSettings:
    schedule: dict[str, Any] = {
        "epochs": 2,
        "batch_tokens": 60,
        "learning_rate": 3e-3,
        "eval_minutes": 60.0,
        "pass_share": 0.8,
        "max_length": 16,
    }
    schedule |= {name: changes.pop(name) for name in list(changes) if name in schedule}
    fields: dict[str, Any] = {
        "method": "eagle3",
        "model": ModelConfig(model=str(model), device="cpu", dtype="float32"),
        "sources": Sources(generations=(generations,)),
        "schedule": Schedule(**schedule),
        "out": out,
        "work": out / "work",
        "draft_vocab_size": 64,
        "held_out": 0.25,
        "top_k": 32,
        "dtype": "float32",
    }
    return TrainSettings(**{**fields, **changes})


def finish(wanted: TrainSettings, *, stops: Callable[[], Watching] = Watching) -> Watching:
    """Runs until the end is reached, as often as it takes."""
    for _ in range(20):
        watching = stops()
        if train_head(wanted, watching, watching.stop):
            return watching
    raise AssertionError("it never ends")


def weights_of(folder: Path, method: str) -> dict[str, torch.Tensor]:
    kept = torch.load(folder / "work" / f"{method}.pt", weights_only=True)
    weights: dict[str, torch.Tensor] = kept["head"]
    return weights


@pytest.mark.parametrize("method", ["eagle3", "eagle", "medusa"])
def test_a_training_that_was_interrupted_ends_with_the_same_weights(
    method: str, model: Path, generations: Path, tmp_path: Path
) -> None:
    whole = finish(settings(model, generations, tmp_path / "whole", method=method))
    parts = finish(
        settings(model, generations, tmp_path / "parts", method=method), stops=lambda: Watching(steps=4)
    )
    assert len(whole.steps) > 4
    assert parts.history[-1].step == whole.history[-1].step
    expected, found = weights_of(tmp_path / "whole", method), weights_of(tmp_path / "parts", method)
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    assert parts.history[-1].rates == whole.history[-1].rates


def test_the_loss_falls_and_drafts_become_right(model: Path, generations: Path, tmp_path: Path) -> None:
    watching = finish(settings(model, generations, tmp_path, epochs=12, eval_minutes=0.0))
    assert watching.history[-1].held_out_loss < watching.history[0].held_out_loss
    assert watching.history[-1].train_loss[0] < 0.8 * watching.history[0].train_loss[0]
    assert watching.history[-1].step == watching.steps[-1].step


def test_features_of_another_run_are_used_again_and_new_rows_are_added(
    model: Path, generations: Path, tmp_path: Path
) -> None:
    few = tmp_path / "few.jsonl"
    lines = generations.read_text("utf-8").splitlines()
    few.write_text("\n".join(lines[:16]) + "\n" + lines[16][:20], "utf-8")
    first = finish(settings(model, few, tmp_path, epochs=1))
    assert first.stages == ["features"]
    again = finish(settings(model, few, tmp_path, method="medusa", epochs=1))
    assert again.stages == []
    few.write_text("\n".join(lines) + "\n", "utf-8")
    grown = finish(settings(model, few, tmp_path, epochs=2))
    assert grown.stages == ["features"]
    assert grown.steps[0].step == first.steps[-1].step + 1
    index = (tmp_path / "work" / "features" / "rows.jsonl").read_text("utf-8").splitlines()
    assert len(index) == len(lines)


def test_features_stay_within_the_disk_budget(
    model: Path, generations: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    budget = 40_000
    finish(settings(model, generations, tmp_path, disk_gb=budget / 2**30, epochs=1))
    folder = tmp_path / "work" / "features"
    size = sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".f16", ".i32"))
    assert budget / 2 < size <= budget
    assert "raise --disk-gb" in caplog.text


def test_what_an_interruption_left_of_a_sequence_is_cut_off(
    model: Path, generations: Path, tmp_path: Path
) -> None:
    finish(settings(model, generations, tmp_path / "a", epochs=1))
    finish(settings(model, generations, tmp_path / "b", epochs=1))
    folder = tmp_path / "b" / "work" / "features"
    index = folder / "rows.jsonl"
    lines = index.read_text("utf-8").splitlines()
    index.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:30], "utf-8")
    with (folder / "hidden.f16").open("ab") as file:
        file.write(b"leftover")
    (tmp_path / "b" / "work" / "eagle3.pt").unlink()
    finish(settings(model, generations, tmp_path / "b", epochs=1))
    for name in ("hidden.f16", "tokens.i32", "top_ids.i32", "top_logprobs.f16", "rows.jsonl"):
        assert (folder / name).read_bytes() == (tmp_path / "a" / "work" / "features" / name).read_bytes()


def test_the_finished_head_drafts_as_was_measured(model: Path, generations: Path, tmp_path: Path) -> None:
    """A chain drafted token by token with the head that was read back, over the target's own features."""
    wanted = settings(model, generations, tmp_path, epochs=16, max_length=64, learning_rate=1e-2)
    rates = finish(wanted).history[-1].rates
    head = read_eagle_head(tmp_path, TargetShape(HIDDEN, VOCAB_SIZE, 4, False))
    assert rates == pytest.approx(_simulated(head, tmp_path, model))
    assert min(rates[:2]) > 0.1


def _simulated(head: EagleHead, folder: Path, model: Path) -> list[float]:
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(model).eval()
    right, tried = [0] * 4, [0] * 4
    index = (folder / "work" / "features" / "rows.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in index]
    tokens = torch.frombuffer(
        bytearray((folder / "work" / "features" / "tokens.i32").read_bytes()), dtype=torch.int32
    )
    for row in rows:
        if not row["held_out"]:
            continue
        ids = tokens[row["begin"] : row["begin"] + row["num_tokens"]].long()
        with torch.inference_mode():
            out = target(ids[None], output_hidden_states=True)
        features = torch.cat([out.hidden_states[index][0] for index in head.config.features], dim=-1)
        chosen = out.logits[0].argmax(dim=-1)
        begin, end = row["answers"][0]["begin"], row["answers"][0]["end"]
        for root in range(begin - 1, end - 2):
            _chain(head, target.get_input_embeddings(), ids[:end], features, chosen, root, right, tried)
    return [hits / max(1, tries) for hits, tries in zip(right, tried, strict=True)]


def _chain(
    head: EagleHead,
    embed: Callable[[torch.Tensor], torch.Tensor],
    ids: torch.Tensor,
    features: torch.Tensor,
    chosen: torch.Tensor,
    root: int,
    right: list[int],
    tried: list[int],
) -> None:
    """Drafts from a root, feeding back its own drafts, for as long as the text goes on with them."""
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, /) -> torch.Tensor:
        keys.append(key)
        values.append(value)
        seen = torch.nn.functional.scaled_dot_product_attention(
            query,
            torch.cat(keys, dim=2),
            torch.cat(values, dim=2),
            is_causal=query.shape[2] > 1,
            enable_gqa=True,
        )
        return seen.transpose(1, 2)

    with torch.inference_mode():
        fused = head.fuse(features[None, : root + 1])
        out = head(embed(ids[None, 1 : root + 2]), fused, torch.arange(root + 1)[None], attend)[:, -1:]
        assert head.draft_to_target is not None
        for depth in range(4):
            place = root + 1 + depth  # whose next token is drafted
            if place + 1 >= len(ids):
                return
            draft = int(head.draft_to_target[head.logits(out, lambda state: state)[0, 0].argmax()])
            tried[depth] += 1
            if draft != int(chosen[place]):
                return
            right[depth] += 1
            if draft != int(ids[place + 1]):
                return
            position = torch.tensor([[root + 1 + depth]])
            out = head(embed(torch.tensor([[draft]])), head.carried(out), position, attend)


def test_finished_medusa_heads_can_be_read(model: Path, generations: Path, tmp_path: Path) -> None:
    finish(settings(model, generations, tmp_path, method="medusa", num_heads=3, epochs=1))
    heads = read_medusa_heads(tmp_path, TargetShape(HIDDEN, VOCAB_SIZE, 4, False))
    assert heads.config.num_heads == 3
    assert (tmp_path / "README.md").read_text("utf-8").count("\n") > 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": Sources()}, "nothing to train on"),
        ({"sources": Sources(generations=(Path("nowhere.jsonl"),))}, "there is no file nowhere.jsonl"),
        ({"schedule": Schedule()}, "no end"),
        ({"held_out": 0.0}, "nothing to evaluate on"),
        ({"draft_vocab_size": 10_000}, "--draft-vocab-size is 10000, but the model has 259"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    changes: dict[str, Any], message: str, model: Path, generations: Path, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match=message):
        finish(settings(model, generations, tmp_path, **changes))


def test_two_runs_do_not_write_the_same_files(model: Path, generations: Path, tmp_path: Path) -> None:
    wanted = settings(model, generations, tmp_path, epochs=1)
    with locked(tmp_path / "work" / ".features.lock", "x"), pytest.raises(StartupError, match="another run"):
        finish(wanted)
    finish(wanted)


def test_a_training_of_another_kind_does_not_go_on(model: Path, generations: Path, tmp_path: Path) -> None:
    finish(settings(model, generations, tmp_path, epochs=1))
    with pytest.raises(StartupError, match="draft_vocab_size 64, not 32"):
        finish(settings(model, generations, tmp_path, epochs=1, draft_vocab_size=32))
    with pytest.raises(StartupError, match="features of another kind"):
        finish(settings(model, generations, tmp_path, epochs=1, top_k=8))


@pytest.mark.parametrize(
    "line",
    ["[]", "{", '{"id": "1"}', '{"prompt_token_ids": [1], "output_token_ids": [259]}'],
)
def test_what_is_no_generation_is_named(line: str, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "generations.jsonl"
    path.write_text(f"{line}\n", "utf-8")
    with pytest.raises(StartupError, match="line 1"):
        finish(settings(model, path, tmp_path))
