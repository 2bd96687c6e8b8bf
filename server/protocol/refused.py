"""Fields that other servers know and this one does not implement.

Dropping one of them would give an answer that the client did not ask for, so each is refused by name
unless its value asks for nothing. Keys that are not listed cannot change what is generated (metadata,
store, service_tier, a client's own x_trace, ...): those are ignored.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic_core import PydanticCustomError


@dataclass(frozen=True, slots=True)
class RefusedField:
    """A field that is refused unless it asks for nothing.

    Attributes:
        name: Its key.
        harmless: Values, besides null, that ask for nothing.
        hint: What the client can do about it.
    """

    name: str
    harmless: tuple[object, ...] = ()
    hint: str = "leave it out"


_NO_AUDIO = "this server reads and writes text only"
_TEMPLATE = "the model's own chat template is always used; leave it out"

REFUSED_EVERYWHERE = (
    RefusedField("guided_json", (), "use structured_outputs.json or response_format"),
    RefusedField("guided_regex", (), "use structured_outputs.regex"),
    RefusedField("guided_choice", (), "use structured_outputs.choice"),
    RefusedField("guided_grammar", (), "use structured_outputs.grammar"),
    RefusedField("json_schema", (), "use structured_outputs.json or response_format"),
    RefusedField("regex", (), "use structured_outputs.regex"),
    RefusedField("ebnf", (), "use structured_outputs.grammar"),
    RefusedField("grammar", ("",), "use structured_outputs.grammar"),
    RefusedField("logits_processors", ([],)),
    RefusedField("custom_logit_processor", ()),
    RefusedField("use_beam_search", (False,)),
    RefusedField("length_penalty", (1.0,)),
    RefusedField("typical_p", (1.0,)),
    RefusedField("mirostat", (0,)),
    RefusedField("early_stopping", (False,)),
    RefusedField("dry_multiplier", (0,)),
    RefusedField("xtc_probability", (0,)),
    RefusedField("top_a", (0,), "use min_p"),
    RefusedField("tfs_z", (1,), "use top_p or min_p"),
    # Other servers' names of what this one has.
    RefusedField("max_new_tokens", (), "use max_tokens"),
    RefusedField("n_predict", (), "use max_tokens"),
    RefusedField("num_predict", (), "use max_tokens"),
    RefusedField("min_new_tokens", (0,), "use min_tokens"),
    RefusedField("stop_sequences", ([],), "use stop"),
    RefusedField("repeat_penalty", (1,), "use repetition_penalty"),
    # How much to think, for models that were trained for it.
    RefusedField(
        "reasoning", ({}, {"effort": "none"}, {"enabled": False}), "say in the prompt how much to think"
    ),
    RefusedField("prompt_embeds", ([],), "this server reads text and token ids"),
    RefusedField("truncate_prompt_tokens", (), "shorten the prompt"),
)

REFUSED_IN_CHAT = (
    *REFUSED_EVERYWHERE,
    RefusedField("functions", ([],), "use tools"),
    RefusedField("function_call", ("none",), "use tool_choice"),
    RefusedField("modalities", (["text"], []), _NO_AUDIO),
    RefusedField("audio", (), _NO_AUDIO),
    # Both steer models that were trained for it; what they mean by default is what happens here.
    RefusedField("reasoning_effort", ("none",), "say in a message how much to think"),
    RefusedField("verbosity", ("medium",), "say in a message how long to answer"),
    RefusedField("web_search_options", (), "this server searches nothing"),
    RefusedField("moderation", (), "this server moderates nothing"),
    RefusedField("chat_template", (), _TEMPLATE),
    RefusedField("documents", ([],), _TEMPLATE),
    RefusedField("add_special_tokens", (False,), _TEMPLATE),
    RefusedField("echo", (False,), "use /v1/completions"),
    RefusedField("suffix", ("",), "use /v1/completions"),
    RefusedField("best_of", (1,), "use n"),
)

REFUSED_IN_COMPLETIONS = (
    *REFUSED_EVERYWHERE,
    RefusedField("tools", ([],), "use /v1/chat/completions"),
    RefusedField("tool_choice", ("none",), "use /v1/chat/completions"),
    RefusedField("max_completion_tokens", (), "this endpoint's field is max_tokens"),
    RefusedField("top_logprobs", (), "this endpoint's field is logprobs, a number"),
    RefusedField("add_special_tokens", (True,), "send token ids to decide about special tokens"),
)

REFUSED_IN_MESSAGES = (
    RefusedField("function_call", (), "use tool_calls"),
    RefusedField("audio", (), _NO_AUDIO),
)


def refuse(values: Mapping[str, object], fields: Iterable[RefusedField]) -> None:
    """Raises a validation error for the first of `fields` that asks for something."""
    for field in fields:
        value = values.get(field.name)
        if value is not None and value not in field.harmless:
            raise PydanticCustomError(
                "refused", "{field} is not supported: {hint}", {"field": field.name, "hint": field.hint}
            )
