"""The stages of `outrider train-head`: answers, features, training.

Each goes on where an earlier run stopped.
"""

import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from engine.config import EngineConfig, NoSpeculation, SchedulerConfig
from engine.errors import StartupError
from engine.factory import assemble
from engine.llm import LLM
from engine.model.loaded_model import LoadedModel
from engine.model.loader import load_causal_lm
from engine.model.weight_type import choose_device
from engine.speculation.heads.eagle import EagleHead
from engine.speculation.heads.medusa import MedusaHeads
from engine.speculation.heads.medusa_tree import Choices, likeliest_choices
from engine.tokenizer import Tokenizer
from engine.training.building import TargetParts, new_eagle, new_medusa
from engine.training.capturing import Limits, capture_rows
from engine.training.checkpoint import Checkpoint
from engine.training.features import Features, FeatureStore, StoreFormat
from engine.training.generating import Generator, Wishes
from engine.training.locking import locked
from engine.training.objective import Objective, Weights
from engine.training.packing import load_batch, packed
from engine.training.passes import Drafter, EagleDrafter, MedusaDrafter
from engine.training.prompts import read_prompts
from engine.training.ranks import rank_rates
from engine.training.rows import Row, read_generations, read_texts
from engine.training.saving import Provenance, save_head
from engine.training.settings import TrainSettings
from engine.training.target import TargetReader
from engine.training.trainer import Evaluation, StepReport, Trainer, held_out_pieces
from engine.training.vocabulary import DraftVocabulary

logger = logging.getLogger(__name__)

_ANSWERS = "generations.jsonl"
_RANKS, _NODES = 10, 63
"""Tokens of each Medusa head that a tree may take, and its size, as the authors' trees have them."""
_EAGLE_FEATURES = Weights(tokens=0.1, features=1.0)
"""EAGLE-1's (Li et al. 2024, section 4.2)."""


class Watcher(Protocol):
    """Who wants to know how it goes."""

    def on_progress(self, stage: str, done: int, total: int) -> None:
        """Of a stage before the training: "answers", counted in conversations, or "features", in tokens."""

    def on_step(self, report: StepReport) -> None:
        """After each step of the training."""

    def on_evaluation(self, history: Sequence[Evaluation]) -> None:
        """After each evaluation; the latest is last."""


def train_head(settings: TrainSettings, watcher: Watcher, stop: Callable[[], bool]) -> bool:
    """Trains a head, or goes on with one.

    Args:
        settings: What to do.
        watcher: Told of everything.
        stop: Asked between steps whether to leave off; what was reached is kept.

    Returns:
        Whether the end was reached.

    Raises:
        StartupError: Something that is needed is missing, damaged or too little.
    """
    settings.check()
    with locked(settings.work / f".{settings.method}.lock", f"a training of {settings.method}"):
        with locked(settings.work / ".features.lock", "answers and features"):
            features = _features(settings, watcher, stop)
        return features is not None and _train(settings, features, watcher, stop)


def _train(settings: TrainSettings, features: Features, watcher: Watcher, stop: Callable[[], bool]) -> bool:
    # The target's packed weights and cache are not needed any more.
    gc.collect()
    torch.manual_seed(settings.schedule.seed)
    workshop = _Workshop.open(settings, features, TargetParts.load(settings.model))
    trainer = workshop.trainer(watcher)
    if trainer.resume():
        logger.info("going on with the training of %s", settings.work)
    return trainer.run(stop)


def set_threads(count: int) -> None:
    """How many threads compute."""
    torch.set_num_threads(count)


def _features(settings: TrainSettings, watcher: Watcher, stop: Callable[[], bool]) -> Features | None:
    """Answers the prompts, and fills the store; None if somebody wants an end."""
    model = load_causal_lm(settings.model)
    if settings.sources.prompts:
        _answer(settings, model, watcher, stop)
        gc.collect()
        if stop():
            return None
    rows = _rows(settings, model)
    reader = TargetReader(model, settings.top_k)
    form = StoreFormat(
        settings.model.model,
        reader.features,
        model.module.config.get_text_config().hidden_size,
        model.vocab_size,
        min(settings.top_k, model.vocab_size),
    )
    folder = settings.work / "features"
    with FeatureStore(folder, form) as store:
        capture_rows(
            reader,
            rows,
            store,
            Limits(settings.held_out, settings.disk_gb),
            lambda done, total: watcher.on_progress("features", done, total),
            stop,
        )
        if stop():
            return None
        features = Features(folder, form, store.rows)
    for what, kept in (("train on", features.train), ("evaluate on", features.held_out)):
        if not any(row.num_answer_tokens > 2 for row in kept):
            raise StartupError(
                f"there is nothing to {what}: {len(features.train)} sequences for training and "
                f"{len(features.held_out)} held out; give more prompts, or another --held-out"
            )
    return features


def _answer(settings: TrainSettings, model: LoadedModel, watcher: Watcher, stop: Callable[[], bool]) -> None:
    """Has the target answer the prompts."""
    sources = settings.sources
    config = EngineConfig(
        model=settings.model,
        scheduler=SchedulerConfig(
            max_num_seqs=sources.max_num_seqs, max_num_batched_tokens=max(512, sources.max_num_seqs)
        ),
        speculation=NoSpeculation(),
    )
    wishes = Wishes(sources.temperatures, sources.max_tokens, sources.seed, sources.max_num_seqs)
    generator = Generator(LLM(assemble(config, model)), settings.work / _ANSWERS, wishes)
    generator.run(
        read_prompts(sources.prompts),
        lambda done, total: watcher.on_progress("answers", done, total),
        stop,
    )


def _rows(settings: TrainSettings, model: LoadedModel) -> list[Row]:
    sources = settings.sources
    own = [settings.work / _ANSWERS] if sources.prompts else []
    rows = [row for path in (*own, *sources.generations) for row in read_generations(path, model.vocab_size)]
    if sources.texts:
        if model.tokenizer is None:
            raise StartupError(f"{model.name} has no tokenizer, so --text cannot be read")
        tokenizer = Tokenizer(model.tokenizer)
        rows += [row for path in sources.texts for row in read_texts(path, tokenizer)]
    return rows


@dataclass(frozen=True, slots=True)
class _Workshop:
    """A head, and all that it is trained with."""

    settings: TrainSettings
    features: Features
    vocabulary: DraftVocabulary
    head: EagleHead | MedusaHeads
    drafter: Drafter
    device: torch.device

    @classmethod
    def open(cls, settings: TrainSettings, features: Features, parts: TargetParts) -> "_Workshop":
        device = choose_device(settings.model.device)
        vocabulary = _vocabulary(settings, features)
        rows = vocabulary.to_target
        if settings.method == "medusa":
            heads = new_medusa(parts, settings.num_heads).to(device)
            drafter: Drafter = MedusaDrafter(heads, parts.output[rows].to(device))
            return cls(settings, features, vocabulary, heads, drafter, device)
        head = new_eagle(parts, settings.method, vocabulary).to(device)
        drafter = EagleDrafter(head, parts.embeddings.to(device), parts.output[rows].to(device))
        return cls(settings, features, vocabulary, head, drafter, device)

    def choices(self, num_heads: int) -> Choices:
        """The likeliest tree of Medusa's heads, by held-out texts."""
        schedule = self.settings.schedule
        batches = (
            load_batch(self.features, pieces).to(self.device)
            for pieces in packed(held_out_pieces(self.features, schedule), schedule.batch_tokens)
        )
        ranks = min(_RANKS, len(self.vocabulary))
        rates = rank_rates(self.drafter, self.vocabulary.to(self.device), batches, num_heads, ranks)
        return likeliest_choices(rates, _NODES)

    def trainer(self, watcher: Watcher) -> Trainer:
        """A trainer that keeps the best head."""
        settings = self.settings
        weights = _EAGLE_FEATURES if settings.method == "eagle" else Weights()
        vocabulary = self.vocabulary.to(self.device)
        fingerprint: dict[str, object] = {
            "method": settings.method,
            "model": settings.model.model,
            "draft_vocab_size": len(vocabulary),
            "num_heads": settings.num_heads if settings.method == "medusa" else 0,
        }
        if settings.schedule.output_rate != 1.0:
            fingerprint["output_rate"] = settings.schedule.output_rate
        checkpoint = Checkpoint(settings.work / f"{settings.method}.pt", fingerprint, self.device)
        return Trainer(
            Objective(self.drafter, vocabulary, weights),
            self.features,
            settings.schedule,
            checkpoint,
            time.monotonic,
            _Keeper(self, watcher),
        )


class _Keeper:
    """Writes the best head, and passes on what it hears."""

    def __init__(self, workshop: _Workshop, watcher: Watcher) -> None:
        self._workshop = workshop
        self.on_step = watcher.on_step
        self.on_evaluation = watcher.on_evaluation
        coverage = workshop.vocabulary.coverage(workshop.features.answer_counts())
        self._provenance = Provenance.of(workshop.features, len(workshop.vocabulary), coverage)

    def on_best(self, evaluation: Evaluation) -> None:
        """See Listener. Medusa heads get a tree that fits them."""
        head = self._workshop.head
        if isinstance(head, MedusaHeads):
            head.config = replace(head.config, choices=self._workshop.choices(head.config.num_heads))
        save_head(self._workshop.settings, head, self._provenance, evaluation)


def _vocabulary(settings: TrainSettings, features: Features) -> DraftVocabulary:
    """The draft vocabulary, the same in every run of a training: later data does not change it."""
    path = settings.work / f"{settings.method}-vocabulary-{settings.draft_vocab_size}.pt"
    size = features.format.vocab_size
    if path.exists():
        return DraftVocabulary.of(torch.load(path, weights_only=True), size)
    if settings.draft_vocab_size > size:
        raise StartupError(
            f"--draft-vocab-size is {settings.draft_vocab_size}, but the model has {size} tokens"
        )
    vocabulary = DraftVocabulary.most_frequent(features.answer_counts(), settings.draft_vocab_size)
    torch.save(vocabulary.to_target, path)
    return vocabulary
