"""LLM: an engine without a server, for scripts, notebooks, tests and benchmarks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from engine.client import ModelInfo
from engine.config import EngineConfig
from engine.errors import EngineError, InvalidRequest
from engine.factory import Engine, build_engine
from engine.outputs import FinishReason, RequestOutput, SpeculationStats, StepStats, TokenLogprob
from engine.planning import PlannerReport
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer


@dataclass(slots=True)
class Completion:
    """One finished answer.

    Attributes:
        prompt_token_ids: What was asked.
        token_ids: The answer.
        text: Its text; empty without a tokenizer.
        logprobs: One entry per token of the answer, if asked for.
        prompt_logprobs: One entry per prompt token, the first None, if asked for.
        finish_reason: Why it ended.
        stop_reason: The stop string or id that ended it, if one did.
        num_cached_tokens: Prompt tokens the prefix cache supplied.
        speculation: What speculation did.
    """

    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    def add(self, output: RequestOutput) -> None:
        """Folds the next output in."""
        self.token_ids.extend(output.token_ids)
        self.text += output.text
        self.logprobs.extend(output.logprobs or ())
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason
        self.num_cached_tokens = output.num_cached_tokens
        self.speculation = output.speculation


class LLM:
    """Runs an engine in the calling thread.

        llm = LLM.from_config(EngineConfig())
        [answer] = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))

    Args:
        engine: What to run.

    Attributes:
        core: The engine, for whoever wants to step it.
        model: What it runs.
        stats: What the last call of `generate` did, all its steps together.
    """

    def __init__(self, engine: Engine) -> None:
        self.core = engine.core
        self._tokenizer = engine.tokenizer
        self._ids = count()
        self.model: ModelInfo = engine.model
        self.stats = StepStats()

    @classmethod
    def from_config(cls, config: EngineConfig) -> "LLM":
        """Loads the models a config names."""
        return cls(build_engine(config))

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            EngineError: It has none.
        """
        if self._tokenizer is None:
            raise EngineError("the model has no tokenizer: give prompts as token ids")
        return self._tokenizer

    def planner_report(self) -> PlannerReport:
        """What the planner of speculation goes by and has done.

        Raises:
            InvalidRequest: The engine runs without speculation.
        """
        return self.core.planner_report()

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
    ) -> list[Completion]:
        """Answers all prompts, batched; in their order.

        Args:
            prompts: Texts or token ids.
            params: For all prompts, or one per prompt.

        Raises:
            InvalidRequest: One of them cannot be served; none is then run.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts, but {len(each)} sampling parameters")
        answers: dict[str, Completion] = {}
        try:
            for prompt, wishes in zip(prompts, each, strict=True):
                ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
                request_id = f"llm-{next(self._ids)}"
                self.core.add_request(request_id, ids, wishes)
                answers[request_id] = Completion(ids)
            while any(answer.finish_reason is None for answer in answers.values()):
                for output in self.core.step():
                    answers[output.request_id].add(output)
        finally:
            # Nothing to abort after a clean run; after an exception the engine must be left empty.
            for request_id, answer in answers.items():
                if answer.finish_reason is None:
                    self.core.abort(request_id)
        self.stats = self.core.take_stats()
        return list(answers.values())
