"""What `outrider train-head` is told."""

import os
from dataclasses import dataclass
from pathlib import Path

from engine.config import ModelConfig
from engine.errors import StartupError
from engine.training.building import Method
from engine.training.prompts import read_prompts
from engine.training.rows import check_generations, check_texts
from engine.training.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where the texts come from.

    Attributes:
        prompts: Files of prompts, which the target answers first.
        generations: Files of answers of the target.
        texts: Files of texts that are trained on as they stand.
        temperatures: Each prompt is answered once with each.
        max_tokens: Of an answer.
        seed: Of answers with a temperature.
        max_num_seqs: Answers at the same time.
    """

    prompts: tuple[Path, ...] = ()
    generations: tuple[Path, ...] = ()
    texts: tuple[Path, ...] = ()
    temperatures: tuple[float, ...] = (0.0, 0.8)
    max_tokens: int = 256
    seed: int = 0
    max_num_seqs: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """All of it.

    Attributes:
        method: Which kind of head.
        model: The target.
        sources: The texts.
        schedule: How it is trained.
        out: Folder of the finished head.
        work: Folder of answers, features and the training's state; heads of one target may share it.
        draft_vocab_size: Tokens that the head can draft; of EAGLE-1 and Medusa those that are trained on.
        num_heads: Of Medusa.
        held_out: Share of the prompts that are kept for the evaluation.
        disk_gb: What features may take, in GiB.
        top_k: Likeliest tokens of the target that are kept for each place.
        dtype: Type of the weights in the finished head, "bfloat16" or "float16".
        command: The command line, for the model card.
    """

    method: Method
    model: ModelConfig
    sources: Sources
    schedule: Schedule
    out: Path
    work: Path
    draft_vocab_size: int = 8192
    num_heads: int = 4
    held_out: float = 0.05
    disk_gb: float = 20.0
    top_k: int = 64
    dtype: str = "bfloat16"
    command: str = ""

    def check(self) -> None:
        """Says before the work what cannot be done.

        Raises:
            StartupError: There is nothing to train on, a line of a file is not what it should be, the
                training has no end, or a folder cannot be written to.
        """
        sources = self.sources
        if not (sources.prompts or sources.generations or sources.texts):
            raise StartupError("there is nothing to train on: give --prompts, --generations or --text")
        for path in (*sources.prompts, *sources.generations, *sources.texts):
            if not path.is_file():
                raise StartupError(f"there is no file {path}")
        if self.schedule.minutes is None and self.schedule.epochs is None:
            raise StartupError("the training has no end: give --minutes or --epochs")
        for folder in (self.out, self.work):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StartupError(f"cannot make the folder {folder}: {error}") from error
            if not os.access(folder, os.W_OK):
                raise StartupError(f"cannot write to the folder {folder}: change its rights, or give another")
        num_rows = (
            len(read_prompts(sources.prompts))
            + sum(map(check_generations, sources.generations))
            + sum(map(check_texts, sources.texts))
        )
        if not num_rows:
            raise StartupError("there is nothing to train on: the files are empty")
