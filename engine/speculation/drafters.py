"""All that draft in an engine, in the order in which they are asked."""

from collections.abc import Sequence

from engine.config import EngineConfig
from engine.core.request import Request
from engine.model.loaded_model import LoadedModel
from engine.speculation.base import Speculator
from engine.speculation.draft_room import DraftRoom
from engine.speculation.drafter import Drafter
from engine.speculation.factory import build_speculator, lookup_settings, max_draft_nodes
from engine.speculation.forced import ForcedSpeculator
from engine.speculation.prediction import PredictionSpeculator
from engine.token_tree import MAX_NODES


def build_drafters(
    config: EngineConfig, target: LoadedModel, speculator: Speculator | None
) -> tuple[Drafter, ...]:
    """The method itself; before it those that cost nothing: a prediction, what a grammar forces, a lookup.

    Args:
        config: The settings.
        target: The model that is served.
        speculator: The method's; None leaves predictions, if the settings allow them.
    """
    free = DraftRoom(MAX_NODES, target.max_model_len, None)
    drafters: list[Drafter] = []
    if config.speculation.predictions:
        predictions = PredictionSpeculator(target.eos_token_ids)
        drafters.append(Drafter("prediction", predictions, free, target.vocab_size, _has_prediction))
    if speculator is None:
        return tuple(drafters)
    drafters.append(Drafter("grammar", ForcedSpeculator(), free, target.vocab_size, _has_grammar))
    wanted = [(config.speculation, speculator)]
    lookup = lookup_settings(config.speculation)
    if lookup is not None:
        found = build_speculator(config.model_copy(update={"speculation": lookup}), target, (), 0)
        assert found is not None, "a lookup is a speculator"
        wanted.insert(0, (lookup, found))
    for settings, each in wanted:
        room = DraftRoom(
            max_draft_nodes(settings),
            target.max_model_len,
            each.requirements.max_model_len,
            branches=each.requirements.branches,
        )
        drafters.append(Drafter(settings.method, each, room, target.vocab_size))
    return tuple(drafters)


def predictions_of(drafters: Sequence[Drafter]) -> PredictionSpeculator | None:
    """The one that follows requests' predictions, if it is among them."""
    speculators = (drafter.speculator for drafter in drafters)
    return next((each for each in speculators if isinstance(each, PredictionSpeculator)), None)


def _has_prediction(request: Request) -> bool:
    return bool(request.params.speculation.prediction)


def _has_grammar(request: Request) -> bool:
    return request.matcher is not None
