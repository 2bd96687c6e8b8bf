"""ChatPrompter: from a conversation to the engine requests that continue it, each with its reader."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from engine.chat_options import ChatOptions
from engine.client import EngineClient
from engine.errors import InvalidRequest
from server.protocol.chat import ChatCompletionRequest
from server.services.answer_reader import AnswerReader
from server.services.bad_words import with_bad_words
from server.services.generation import make_choices
from server.services.limits import Limits
from server.services.params import chat_params
from server.services.prediction import with_prediction
from server.services.reasoning import OPENING, ReasoningSplitter, has_thoughts
from server.tools.plan import ToolPlanner


class ChatPrompter:
    """What all endpoints that continue conversations have in common.

    Args:
        engine: Its chat template makes the prompts.
        limits: What one call may ask for.
        tools: What a request's tools mean.
    """

    def __init__(self, engine: EngineClient, limits: Limits, tools: ToolPlanner) -> None:
        self._engine = engine
        self._limits = limits
        self._tools = tools

    async def readers(self, request: ChatCompletionRequest, call_id: str, scope: str) -> list[AnswerReader]:
        """The request's choices, each with its reader.

        Args:
            request: The conversation and how to go on.
            call_id: What the engine's request ids begin with.
            scope: Whose request it is, see SamplingParams.

        Raises:
            InvalidRequest: A field is wrong, spelt as the request's endpoint spells it.
            ContextTooLong: Prompt and answer do not fit.
        """
        self._limits.check_choices(request.n, "n")
        plan = await self._tools.plan(request)
        token_ids = await self.render(request)
        params = chat_params(request, len(token_ids), self._engine.model, self._limits.max_logprobs)
        self._limits.check_prompt_logprobs(params, len(token_ids))
        params = await with_bad_words(params, self._engine, request.bad_words)
        params = await with_prediction(params, self._engine, request.prediction, token_ids)
        params = replace(params, cache_scope=scope)
        if plan is not None:
            params = plan.applied(params)
        splits, is_open = await self._thoughts(request, token_ids)
        return [
            AnswerReader(choice, plan, ReasoningSplitter(is_open=is_open) if splits else None)
            for choice in make_choices(call_id, 0, request.n, token_ids, params)
        ]

    async def render(self, request: ChatCompletionRequest) -> list[int]:
        """The prompt.

        Raises:
            InvalidRequest: The model's chat template refuses the conversation.
        """
        messages, tools = await asyncio.to_thread(self._tools.conversation, request)
        options = ChatOptions(request.continue_final_message, request.chat_template_kwargs)
        param = request.names.prompt
        try:
            token_ids = await self._engine.apply_chat_template(messages, tools, options)
        except InvalidRequest as error:
            raise InvalidRequest(str(error), param if error.param == "messages" else error.param) from error
        if not token_ids:
            raise InvalidRequest(f"{param} makes an empty prompt with this model's chat template", param)
        return token_ids

    async def _thoughts(
        self, request: ChatCompletionRequest, prompt_token_ids: Sequence[int]
    ) -> tuple[bool, bool]:
        """Whether thoughts are taken apart, and whether the prompt has begun them."""
        if not (request.separate_reasoning and has_thoughts(self._engine.model.chat_template)):
            return False, False
        # The tag and white space, in however many tokens.
        end = await self._engine.decode(prompt_token_ids[-len(OPENING) - 4 :])
        return True, end.rstrip().endswith(OPENING)
