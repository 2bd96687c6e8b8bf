"""What training counts as accepted is what the engine accepts, draft by draft.

The engine's drafts begin where the last one ended, training's at every place: those that begin at the same
places are held against each other.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from engine.config import CacheConfig, DType, EngineConfig, ModelConfig
from engine.factory import assemble
from engine.head_config import EagleSpeculation
from engine.llm import LLM
from engine.model.loaded_model import LoadedModel
from engine.sampling_params import SamplingParams
from engine.speculation.eagle import EagleSpeculator
from engine.speculation.heads.eagle import EagleHead
from engine.speculation.heads.eagle_reading import read_eagle_head
from engine.speculation.heads.target import TargetShape
from engine.speculation.loaded_head import wrap_eagle
from engine.training.building import TargetParts
from engine.training.features import Features, FeatureStore, Stored, StoreFormat
from engine.training.objective import Acceptance, Objective, Weights, total
from engine.training.packing import Piece, load_batch
from engine.training.passes import EagleDrafter
from engine.training.running import train_head
from engine.training.schedule import Schedule
from engine.training.settings import Sources, TrainSettings
from engine.training.vocabulary import DraftVocabulary
from tests.engines import build_llm, drafter_of, load_tiny
from tests.operators import need_operators, share_operators
from tests.tiny import VOCAB_SIZE, save_tiny, tiny_model
from tests.training.test_running import HIDDEN, Watching

CHAIN = 4
LAYERS = 4
PROMPTS = [[97 + number, 100 + number % 3, 97] for number in range(10)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Trained:
    """A head that has learnt some greedy answers, in a folder, and the type of its target's weights."""

    folder: Path
    dtype: DType

    @property
    def head(self) -> EagleHead:
        shape = TargetShape(HIDDEN, VOCAB_SIZE, LAYERS, ties_embeddings=False)
        return read_eagle_head(self.folder, shape, dtype=torch.float32)

    @property
    def target(self) -> LoadedModel:
        return load_tiny(num_hidden_layers=LAYERS, dtype=self.dtype)

    @property
    def features(self) -> Features:
        folder = self.folder / "work" / "features"
        fields = json.loads((folder / "format.json").read_text("utf-8"))
        form = StoreFormat(**fields | {"features": tuple(fields["features"])})
        with FeatureStore(folder, form) as store:
            return Features(folder, form, store.rows)

    def build(self) -> LLM:
        """An engine that drafts with it."""
        config = EngineConfig(
            cache=CacheConfig(block_size=4, num_kv_blocks=256),
            speculation=EagleSpeculation(head="tiny", num_draft_tokens=CHAIN, planner="fixed"),
        )
        target = self.target
        return LLM(assemble(config, target, [wrap_eagle(self.head, target, name="tiny")]))


@pytest.fixture(scope="module", params=["float32", "int8"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    need_operators()
    folder, dtype = tmp_path_factory.mktemp("head"), request.param
    model = save_tiny(folder / "model", num_hidden_layers=LAYERS)
    share_operators(folder / "cache")
    answers = build_llm(target=load_tiny(num_hidden_layers=LAYERS, dtype=dtype)).generate(PROMPTS, GREEDY)
    rows = [
        {"id": str(number), "prompt_token_ids": prompt, "output_token_ids": answer.token_ids}
        for number, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True))
    ]
    generations = folder / "generations.jsonl"
    generations.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    settings = TrainSettings(
        method="eagle3",
        model=ModelConfig(
            model=str(model), device="cpu", dtype=dtype, max_model_len=128, cache_dir=folder / "cache"
        ),
        sources=Sources(generations=(generations,)),
        schedule=Schedule(epochs=25, batch_tokens=100, learning_rate=1e-2, eval_minutes=60.0),
        out=folder,
        work=folder / "work",
        draft_vocab_size=64,
        held_out=0.2,
        top_k=8,
        dtype="float32",
    )
    assert train_head(settings, Watching(), lambda: False)
    return Trained(folder, dtype)


def accepted_by_place(llm: LLM, tokens: list[int], begin: int) -> dict[int, int]:
    """Per place at which a draft began how many of its tokens stood."""
    core = llm.core
    core.add_request("one", tokens[:begin], replace(GREEDY, max_tokens=len(tokens) - begin))
    said: list[int] = []
    found: dict[int, int] = {}
    while core.has_work:
        for output in core.step():
            if said:
                found[begin - 2 + len(said)] = len(output.token_ids) - 1
            said += output.token_ids
    assert said == tokens[begin:]
    return found


def in_engine(llm: LLM, features: Features, row: Stored) -> dict[int, int]:
    """Those whose whole chain training counts as well."""
    begin, end = row.answers[0].begin, row.answers[0].end
    found = accepted_by_place(llm, features.tokens(row).tolist(), begin)
    return {place: count for place, count in found.items() if place + 2 + CHAIN <= end}


def in_training(objective: Objective, features: Features, row: Stored, places: list[int]) -> Acceptance:
    """The evaluation's counts of drafts that begin at these places."""
    batch = load_batch(features, [Piece(row, 0, row.num_tokens)])
    chosen = torch.isin(batch.roots, torch.tensor(places))
    assert int(chosen.sum()) == len(places)
    parts = {name: getattr(batch, name)[chosen] for name in ("roots", "reach", "targets")}
    return objective.acceptance(replace(batch, **parts), CHAIN)


def compared(
    trained: Trained, llm: LLM, max_rows: int = len(PROMPTS)
) -> tuple[Acceptance, list[int], list[int]]:
    """What training counts, and what the engine does: drafts that stand, and those whose parents do."""
    head, features = trained.head, trained.features
    parts = TargetParts.of(tiny_model(num_hidden_layers=LAYERS))
    assert head.draft_to_target is not None
    vocabulary = DraftVocabulary.of(head.draft_to_target, VOCAB_SIZE)
    objective = Objective(EagleDrafter(head, parts.embeddings, parts.output), vocabulary, Weights())
    counted: list[Acceptance] = []
    accepted: list[int] = []
    for row in (*features.train, *features.held_out)[:max_rows]:
        found = in_engine(llm, features, row)
        accepted += found.values()
        counted.append(in_training(objective, features, row, list(found)))
    right = [sum(count > depth for count in accepted) for depth in range(CHAIN)]
    return total(counted), right, [len(accepted), *right[:-1]]


def test_the_engine_accepts_what_training_counts(trained: Trained) -> None:
    counts, right, tried = compared(trained, trained.build())
    assert right[0] > 20
    assert tried[0] - right[0] > 20
    if trained.dtype == "float32":
        assert (list(counts.right), list(counts.tried)) == (right, tried)
    else:
        # The engine's head is rounded as well: here and there another token is the likeliest.
        assert counts.right == pytest.approx(right, abs=3)


def shifted(llm: LLM) -> None:
    """Features of the position after."""
    drafting = llm.core._drafting
    assert drafting is not None
    note = drafting.note_features
    drafting.note_features = lambda plan, rows: note(plan, rows.roll(1, 0))  # type: ignore[method-assign,assignment]


def other_ids(llm: LLM) -> None:
    """Rows of the output layer that stand for their neighbours' tokens."""
    speculator = drafter_of(llm).speculator
    assert isinstance(speculator, EagleSpeculator)
    runner = speculator._runner
    for part in (runner._stack, runner):
        ids = getattr(part, "_ids", None)
        if isinstance(ids, torch.Tensor):
            part._ids = ids.roll(1)  # type: ignore[union-attr]
        elif ids is not None:
            part._ids = replace(ids, to_target=ids.to_target.roll(1))  # type: ignore[union-attr]


@pytest.mark.parametrize("plant", [shifted, other_ids])
def test_planted_errors_are_found(trained: Trained, plant) -> None:  # type: ignore[no-untyped-def]
    llm = trained.build()
    plant(llm)
    counts, right, _ = compared(trained, llm, max_rows=4)
    assert sum(counts.right) - sum(right) > 8
