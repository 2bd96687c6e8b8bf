"""DraftVocabulary: the part of a draft model's output layer that its passes read.

With a large vocabulary the output layer is a third of a small model's weights, and nearly all of its rows are
of tokens that hardly anybody says. A draft may leave out any token: the target, which chooses, has all of
them (FR-Spec, Zhao et al. 2025, which keeps the tokens that are frequent in a corpus). Ids of the usual
tokenizers are in the order of their merges, frequent ones first. So the first so many are kept and, for each
request, what its text or its parameters name: a name in a prompt, or a prompt in Chinese, brings its own.

    ids       0 ... size - 1 │ panels of 16 that texts have tokens in
    entries   0 ... size - 1 │ size ...
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from engine.drafting_config import DraftVocabSize
from engine.errors import ModelNotSupported, StartupError
from engine.model.hidden_states import HiddenSelection
from engine.model.input_batch import InputBatch, SequenceSlice
from engine.model.model_runner import ModelRunner
from engine.model.panel_linear import PANEL, PanelLinear, num_panels, taken
from engine.speculation.base import DraftRequest
from engine.speculation.draft_ids import DraftIds
from engine.speculation.target_ends import TargetEnds

logger = logging.getLogger(__name__)

Scorer = Callable[[torch.Tensor], torch.Tensor]
"""[R, hidden_size] to logits of some ids, [R, entries]."""

_USUAL_SIZE = 32768
"""Ids kept of a vocabulary more than twice as large: of a smaller one too little is saved."""

_NUM_PROBED = 4
_TOLERANCE = 1e-3
"""Of the largest logit: float32 in another order of sums is far below, another formula far above."""


@dataclass(slots=True)
class _Text:
    """What a request has named so far.

    Attributes:
        num_read: Tokens of its text that have been looked at.
        panels: Those outside of the first ids.
    """

    num_read: int = 0
    panels: set[int] = field(default_factory=set)


class DraftVocabulary:
    """Runs a draft model with a part of its output layer.

    What may be drafted for a request depends on the request alone, whoever shares its batch.

    Args:
        runner: The draft model; its vocab_size is the target's.
        ends: The draft model's own embedding and output layer.
        size: Leading ids that are kept, rounded up to whole panels; fewer than the target has.
        always: Further ids that are kept: those that end an answer.

    Raises:
        StartupError: A part of the output layer cannot be read alone; the message says why.
    """

    def __init__(self, runner: ModelRunner, ends: TargetEnds, size: int, always: Collection[int]) -> None:
        if not runner.picks_rows:
            raise StartupError("the draft model makes logits of every token that it reads, wanted or not")
        try:
            self._tap = runner.tap(HiddenSelection(last=True))
        except ModelNotSupported as error:
            raise StartupError(str(error)) from error
        self._runner = runner
        self._ends = ends
        self._pick = _picker(ends.output_layer)
        self._num_first = num_panels(size)
        self._first = self._pick(slice(0, self._num_first))
        self._always = self._panels_of(always)
        self._texts: dict[str, _Text] = {}
        self._users: Counter[int] = Counter(self._always)
        self._panels: list[int] = []
        self._others: dict[str, torch.Tensor] = {}
        self._take(sorted(self._always))
        self._check()

    @property
    def ids(self) -> DraftIds:
        """What the entries of a row stand for, since `follow`."""
        return self._ids

    def follow(self, requests: Iterable[DraftRequest]) -> None:
        """Takes up what the requests have named since they were last seen."""
        wanted = dict.fromkeys(panel for panel in self._panels if self._users[panel])
        for request in requests:
            text = self._texts.get(request.request_id)
            if text is None:
                text = self._texts[request.request_id] = _Text(panels=self._panels_of(_named(request)))
                self._users.update(text.panels)
                wanted |= dict.fromkeys(sorted(text.panels))
            fresh = self._panels_of(request.token_ids[text.num_read :]) - text.panels
            text.num_read = len(request.token_ids)
            if fresh:
                text.panels |= fresh
                self._others.pop(request.request_id, None)
            self._users.update(fresh)
            wanted |= dict.fromkeys(sorted(fresh))
        if len(wanted) != len(self._panels) or any(panel not in wanted for panel in self._panels):
            self._take(list(wanted))

    def release(self, request_id: str) -> None:
        """Forgets a request; what it alone has named goes when the next one is followed."""
        self._others.pop(request_id, None)
        text = self._texts.pop(request_id, None)
        if text is not None:
            self._users.subtract(text.panels)

    def forward(self, batch: InputBatch, owners: Sequence[str]) -> torch.Tensor:
        """One pass over a batch, as ModelRunner.forward does it.

        Args:
            batch: The tokens.
            owners: For each wanted row the id of its request, which has been followed.

        Returns:
            float32 [num_rows, entries] as `ids` says; -inf where only other requests have named a token.
        """
        logits = self._score(self._states(batch))
        if owners and self._panels and len(self._texts) > 1:
            others = torch.stack([self._others_of(owner) for owner in owners])
            more = logits[:, self._num_first * PANEL :].view(len(owners), -1, PANEL)
            more.masked_fill_(others[:, :, None], -torch.inf)
        return self._ends.cut(logits, self._ids)

    def _states(self, batch: InputBatch) -> torch.Tensor:
        """The states that the output layer sees, of the wanted rows; it is not asked for any itself."""
        bare = replace(batch, logits_rows=batch.logits_rows[:0])
        return self._runner.forward_tapped(bare, self._tap).features.index_select(0, batch.logits_rows)

    def _score(self, states: torch.Tensor) -> torch.Tensor:
        parts = [part(states) for part in self._parts]
        return self._ends.finish(torch.cat(parts, dim=1))

    def _others_of(self, request_id: str) -> torch.Tensor:
        """Which panels beside the first only other requests have named, bool [panels]."""
        others = self._others.get(request_id)
        if others is None:
            own = self._texts[request_id].panels | self._always
            others = torch.tensor([panel not in own for panel in self._panels])
            self._others[request_id] = others
        return others

    def _panels_of(self, token_ids: Iterable[int]) -> set[int]:
        """The panels of tokens that are not among the first."""
        first, size = self._num_first * PANEL, self._ends.vocab_size
        return {token // PANEL for token in token_ids if first <= token < size}

    def _take(self, panels: list[int]) -> None:
        """Reads these panels from now on, beside the first."""
        self._panels = panels
        self._others.clear()
        which = torch.tensor(panels, dtype=torch.int64)
        self._parts = [self._first, self._pick(which)] if panels else [self._first]
        ids = self._ends.ids(torch.cat((torch.arange(self._num_first * PANEL), _ids_of(which))))
        assert ids is not None, "of a map"
        self._ids = ids

    def _check(self) -> None:
        """Holds logits made here against the model's own.

        Raises:
            StartupError: They are others: the model does more to its states or logits than is known.
        """
        count = min(_NUM_PROBED, self._runner.cache.block_size)
        batch = self._runner.build([SequenceSlice(range(count), 0, [0], rows=count)])
        with self._runner.threads, torch.inference_mode():
            expected = self._runner.forward(batch)[:, self._ids.to_target]
            ours = self._ends.cut(self._score(self._states(batch)), self._ids)
            differs = (ours - expected).abs().max()
        if not differs <= _TOLERANCE * expected.abs().max():
            raise StartupError("the draft model makes more of its states than its output layer does")


def choose_vocabulary(
    wanted: DraftVocabSize, runner: ModelRunner, ends: TargetEnds, always: Collection[int]
) -> DraftVocabulary | None:
    """The vocabulary that the settings want of a draft model; None for all of the target's tokens.

    Args:
        wanted: How many leading ids it keeps.
        runner: See DraftVocabulary.
        ends: See DraftVocabulary.
        always: See DraftVocabulary.

    Raises:
        StartupError: A number is asked for, and only all tokens can be had.
    """
    if wanted == "auto":
        size = _USUAL_SIZE if ends.vocab_size > 2 * _USUAL_SIZE else ends.vocab_size
    else:
        size = ends.vocab_size if wanted == "all" else wanted
    if num_panels(size) * PANEL >= ends.vocab_size:
        return None
    try:
        vocabulary = DraftVocabulary(runner, ends, size, always)
    except StartupError as error:
        if wanted != "auto":
            raise StartupError(
                f"draft_vocab_size is {wanted}, but {error}; leave draft_vocab_size out or set it to all"
            ) from error
        logger.info("all %d tokens are drafted from: %s", ends.vocab_size, error)
        return None
    logger.info(
        "of %d tokens the first %d are drafted from, and what else a request's text holds",
        ends.vocab_size,
        size,
    )
    return vocabulary


def _named(request: DraftRequest) -> Iterable[int]:
    """Ids that a request's parameters name and that may be chosen."""
    params = request.params
    liked = (token for token, bias in params.logit_bias if bias > 0)
    return (*params.stop_token_ids, *params.allowed_token_ids, *liked)


def _picker(layer: object) -> Callable[[slice | torch.Tensor], Scorer]:
    """What makes an output layer of some panels of another one.

    Raises:
        StartupError: The layer cannot be taken apart.
    """
    if isinstance(layer, PanelLinear):
        return layer.picked
    if type(layer) is nn.Linear and layer.weight.device.type == "cpu":
        return partial(_rows_of, layer)
    raise StartupError("the draft model's output layer is neither packed integers nor a plain layer on a CPU")


def _rows_of(layer: nn.Linear, panels: slice | torch.Tensor) -> Scorer:
    if isinstance(panels, slice):
        rows: slice | torch.Tensor = slice(panels.start * PANEL, panels.stop * PANEL)
    else:
        # Behind a last panel that is not full any row will do: its ids are none of the target's.
        rows = _ids_of(panels).clamp_(max=layer.out_features - 1)
    bias = None if layer.bias is None else taken(layer.bias, rows)
    return partial(functional.linear, weight=taken(layer.weight, rows), bias=bias)


def _ids_of(panels: torch.Tensor) -> torch.Tensor:
    """int64 [n] to int64 [n * PANEL]."""
    return (panels[:, None] * PANEL + torch.arange(PANEL)).flatten()
