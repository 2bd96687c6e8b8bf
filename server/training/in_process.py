"""The one place of the command that knows the engine's training."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.config import ModelConfig
from engine.training.running import set_threads, train_head
from engine.training.schedule import Schedule
from engine.training.settings import Sources, TrainSettings
from engine.training.trainer import Evaluation, StepReport
from server.training.curves import as_csv, as_png
from server.training.plan import Plan
from server.training.progress import Progress


def run_training(plan: Plan, model: ModelConfig, command: str, stop: Callable[[], bool]) -> bool:
    """Trains.

    Args:
        plan: What to do.
        model: The target.
        command: The command line, for the model card.
        stop: Asked between steps whether to leave off.

    Returns:
        Whether the end was reached.

    Raises:
        StartupError: Something that is needed is missing, damaged or too little.
    """
    if plan.threads is not None:
        set_threads(plan.threads)
    watcher = _Watcher(plan)
    try:
        return train_head(_settings(plan, model, command), watcher, stop)
    finally:
        watcher.close()


class _Watcher:
    """Shows what happens, and keeps table and picture up to date."""

    def __init__(self, plan: Plan) -> None:
        self._out: Path = plan.out
        self._progress = None if plan.quiet else Progress(sys.stderr, time.monotonic)

    def on_progress(self, stage: str, done: int, total: int) -> None:
        """See Watcher."""
        if self._progress is not None:
            self._progress.on_stage(stage, done, total)

    def on_step(self, report: StepReport) -> None:
        """See Watcher."""
        if self._progress is not None:
            self._progress.on_step(report)

    def on_evaluation(self, history: Sequence[Evaluation]) -> None:
        """See Watcher."""
        (self._out / "training.csv").write_text(as_csv(history), encoding="utf-8")
        (self._out / "training.png").write_bytes(as_png(history))
        latest = history[-1]
        if self._progress is not None:
            rates = " ".join(f"{rate:.3f}" for rate in latest.rates)
            self._progress.say(
                f"held out, after {latest.minutes:.1f} min: acceptance {rates}, "
                f"{latest.tokens_per_forward:.3f} tokens per forward, loss {latest.held_out_loss:.3f}"
            )

    def close(self) -> None:
        """Leaves the screen in order."""
        if self._progress is not None:
            self._progress.close()


def _settings(plan: Plan, model: ModelConfig, command: str) -> TrainSettings:
    sources = Sources(
        prompts=plan.prompts,
        generations=plan.generations,
        texts=plan.texts,
        temperatures=plan.temperatures,
        max_tokens=plan.max_tokens,
        seed=plan.seed,
        max_num_seqs=plan.max_num_seqs,
    )
    schedule = Schedule(
        minutes=plan.minutes,
        epochs=plan.epochs,
        learning_rate=plan.learning_rate,
        warmup=plan.warmup,
        passes=plan.num_heads if plan.method == "medusa" else plan.passes,
        pass_ramp=0.0 if plan.method == "medusa" else plan.pass_ramp,
        pass_share=1.0 if plan.method == "medusa" else plan.pass_share,
        noise=plan.noise,
        batch_tokens=plan.batch_tokens,
        accumulate=plan.accumulate,
        weight_decay=plan.weight_decay,
        output_rate=plan.output_rate,
        seed=plan.seed,
        max_length=plan.max_length,
        eval_minutes=plan.eval_minutes,
        eval_tokens=plan.eval_tokens,
    )
    return TrainSettings(
        method=plan.method,
        model=model,
        sources=sources,
        schedule=schedule,
        out=plan.out,
        work=plan.work,
        draft_vocab_size=plan.draft_vocab_size,
        num_heads=plan.num_heads,
        held_out=plan.held_out,
        disk_gb=plan.disk_gb,
        top_k=plan.top_k,
        dtype=plan.head_dtype,
        command=command,
    )
