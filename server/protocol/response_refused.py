"""Fields of /v1/responses that are refused, and why; see refused."""

from server.protocol.refused import REFUSED_EVERYWHERE, RefusedField

_INSTEAD = {
    "max_new_tokens": "use max_output_tokens",
    "n_predict": "use max_output_tokens",
    "num_predict": "use max_output_tokens",
    "json_schema": "use text.format",
    "truncate_prompt_tokens": "use truncation",
    "guided_json": "use structured_outputs.json or text.format",
}
"""What this endpoint calls differently."""

REFUSED_IN_RESPONSES = (
    # What needs a store, a service or a model of another kind.
    RefusedField("background", (False,), "the answer comes in this request; stream it"),
    RefusedField("background_options", ({},), "the answer comes in this request; stream it"),
    RefusedField("conversation", (), "use previous_response_id, or send the items as input"),
    RefusedField("context_management", ([],), "use truncation"),
    RefusedField("prompt", (), "this server stores no prompts; send the text as instructions and input"),
    RefusedField("moderation", (), "this server moderates nothing"),
    RefusedField("image", ({},), "this server reads and writes text only"),
    RefusedField("access_programs", ({},), "there are none"),
    # Other endpoints' names of what this one has, and what it has not.
    RefusedField("messages", (), "use input"),
    RefusedField("max_tokens", (), "use max_output_tokens"),
    RefusedField("max_completion_tokens", (), "use max_output_tokens"),
    RefusedField("response_format", ({"type": "text"},), "use text.format"),
    RefusedField("logprobs", (False,), "use include and top_logprobs"),
    RefusedField("reasoning_effort", (), "use reasoning.effort"),
    RefusedField("verbosity", ("medium",), "say in the input how long to answer"),
    RefusedField("functions", ([],), "use tools"),
    RefusedField("function_call", ("none",), "use tool_choice"),
    RefusedField("n", (1,), "send several requests"),
    RefusedField("best_of", (1,), "send several requests"),
    RefusedField("echo", (False,), "use /v1/completions"),
    RefusedField("suffix", ("",), "use /v1/completions"),
    RefusedField("return_token_ids", (False,), "use /v1/chat/completions"),
    RefusedField("prompt_logprobs", (), "use echo with logprobs at /v1/completions"),
    RefusedField("continue_final_message", (False,), "use /v1/chat/completions"),
    RefusedField("add_generation_prompt", (True,), "use /v1/chat/completions"),
    RefusedField("separate_reasoning", (True,), "thoughts are items of their own"),
    RefusedField("chat_template", (), "the model's own chat template is always used"),
    RefusedField("documents", ([],), "put them into the input"),
    RefusedField("modalities", (["text"], []), "this server reads and writes text only"),
    RefusedField("audio", (), "this server reads and writes text only"),
    RefusedField("web_search_options", (), "this server searches nothing"),
    *(
        RefusedField(field.name, field.harmless, _INSTEAD.get(field.name, field.hint))
        for field in REFUSED_EVERYWHERE
        if field.name not in ("reasoning", "prompt_logprobs")
    ),
)

REFUSED_IN_TEXT = (RefusedField("verbosity", ("medium",), "say in the input how long to answer"),)

REFUSED_IN_REASONING = (
    # auto leaves the choice to the server.
    RefusedField("summary", ("auto",), "thoughts come as they are"),
    RefusedField("generate_summary", ("auto",), "thoughts come as they are"),
    RefusedField("context", ("auto",), "earlier thoughts are not shown to the model"),
    RefusedField("mode", ("standard",), "there is one"),
)

REFUSED_IN_STREAM_OPTIONS = (
    RefusedField("include_obfuscation", (False,), "events are as long as what they say"),
    RefusedField("continuous_usage_stats", (False,), "the last event has the usage"),
)
