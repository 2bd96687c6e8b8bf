"""The ids a model may say, the ids that end its answer, and whether two models mean the same by them."""

import logging
from collections.abc import Iterable

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from engine.errors import StartupError
from engine.model.loaded_model import LoadedModel
from engine.model.support import text_config

logger = logging.getLogger(__name__)

END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|return|>", "<|call|>")
"""Tokens with which the common chat templates close the assistant's turn."""

_HARMONY_END = "<|return|>"
_MESSAGE_END = "<|end|>"


def sampled_vocab_size(module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Ids from 0 that may be sampled: those the tokenizer knows and the embedding holds.

    Embeddings are often padded to a round size; a padded row has no text, so it is never sampled.
    """
    rows: int = module.get_input_embeddings().weight.shape[0]
    if tokenizer is None:
        return rows
    size: int = max(tokenizer.get_vocab().values()) + 1
    if size > rows:
        logger.warning(
            "the tokenizer has %d ids but the embedding %d rows: ids from %d on cannot be used",
            size,
            rows,
            rows,
        )
    return min(size, rows)


def end_token_ids(module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Every id that ends an answer, whoever says so: generation config, config, tokenizer or chat template.

    Converted checkpoints often lose the generation config, and with it the id that ends a turn. Such an id
    is recognised by its name when it is a special token that the chat template uses.
    """
    ids: set[int] = set()
    generation = module.generation_config
    if generation is not None:
        ids.update(_as_ids(generation.eos_token_id))
    ids.update(_as_ids(_eos_of(module.config)))
    ids.update(_as_ids(_eos_of(text_config(module.config))))
    if tokenizer is not None:
        ids.update(_as_ids(tokenizer.eos_token_id))
        ids.update(_end_of_turn_ids(tokenizer))
    return frozenset(ids)


def check_same_vocabulary(target: LoadedModel, draft: LoadedModel) -> None:
    """Makes sure that an id means the same token to both models.

    Embeddings padded to different sizes are fine, since padded ids are never drafted or sampled.

    Raises:
        StartupError: Sizes differ, or an id stands for different tokens.
    """
    advice = "Choose a draft of the target's family, or speculation without a draft model."
    if target.vocab_size != draft.vocab_size:
        raise StartupError(
            f"the draft model {draft.name} has a vocabulary of {draft.vocab_size} tokens, the target "
            f"{target.name} one of {target.vocab_size}; a draft must use the target's tokens. {advice}"
        )
    if target.tokenizer is None and draft.tokenizer is None:
        return
    if target.tokenizer is None or draft.tokenizer is None:
        missing = target if target.tokenizer is None else draft
        raise StartupError(
            f"{missing.name} has no tokenizer, so its tokens cannot be compared with the other's. {advice}"
        )
    target_tokens = _tokens_by_id(target.tokenizer)
    draft_tokens = _tokens_by_id(draft.tokenizer)
    for token_id in range(target.vocab_size):
        ours, theirs = target_tokens.get(token_id), draft_tokens.get(token_id)
        if ours != theirs:
            raise StartupError(
                f"token id {token_id} is {ours!r} to the target {target.name} but {theirs!r} to the draft "
                f"model {draft.name}; a draft must use the target's tokens. {advice}"
            )


def _tokens_by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}


def _eos_of(config: PreTrainedConfig) -> int | list[int] | None:
    eos: int | list[int] | None = getattr(config, "eos_token_id", None)
    return eos


def _as_ids(value: int | Iterable[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _end_of_turn_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    template = tokenizer.chat_template
    if not template:
        return set()
    text = "".join(template.values()) if isinstance(template, dict) else template
    special = {
        token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    found = {name: special[name] for name in END_OF_TURN if name in special and name in text}
    if _HARMONY_END in special:
        # In the harmony format (gpt-oss) this token ends one message of several; another ends the turn.
        found.pop(_MESSAGE_END, None)
    return set(found.values())
