"""Texts to tokens and back, as the served model does it."""

from engine.client import EngineClient
from server.protocol.tokenization import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from server.services.models import ModelService
from server.services.params import check_token_ids


class TokenizationService:
    """Serves POST /tokenize and /detokenize.

    Args:
        engine: Whose tokenizer it is.
        models: Which model names exist.
    """

    def __init__(self, engine: EngineClient, models: ModelService) -> None:
        self._engine = engine
        self._models = models

    async def tokenize(self, request: TokenizeRequest) -> Tokenized:
        """The tokens of a text or a conversation.

        Raises:
            ApiError: 404; there is no model of that name.
            InvalidRequest: The text cannot be encoded, or the chat template refuses the messages.
        """
        self._models.resolve(request.model)
        if request.messages:
            messages = [message.model_dump(exclude_unset=True) for message in request.messages]
            token_ids = await self._engine.apply_chat_template(messages)
        else:
            token_ids = await self._engine.encode(
                request.prompt or "", add_special_tokens=request.add_special_tokens
            )
        answer = Tokenized(
            count=len(token_ids), max_model_len=self._engine.model.max_model_len, tokens=token_ids
        )
        if request.return_token_strs:
            spelling = await self._engine.token_bytes(token_ids)
            answer.token_strs = [token.decode("utf-8", "replace") for token in spelling]
        return answer

    async def detokenize(self, request: DetokenizeRequest) -> Detokenized:
        """The text of tokens.

        Raises:
            ApiError: 404; there is no model of that name.
            InvalidRequest: The model has no such token.
        """
        self._models.resolve(request.model)
        check_token_ids(request.tokens, self._engine.model, "tokens")
        return Detokenized(prompt=await self._engine.decode(request.tokens))
