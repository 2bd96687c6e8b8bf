"""ChatTemplate: a conversation as the text that the model was trained to continue."""

import re
from collections.abc import Mapping, Sequence

import jinja2
from transformers import PreTrainedTokenizerBase

from engine.chat_options import DEFAULT_CHAT, ChatOptions
from engine.errors import InvalidRequest, StartupError

_INSTRUCTIONS = frozenset({"system", "developer"})
_EVERY_TEMPLATE_TAKES = frozenset({"user", "assistant"})

_MARK = re.compile(r"message-\d+-mark")

Message = Mapping[str, object]


class ChatTemplate:
    """A Jinja template, run in transformers' sandbox.

    No message is lost: a developer message becomes a system message where the template does not name that
    role, refuses it or passes over it, and a conversation of which the template would still leave something
    out is refused.

    Args:
        tokenizer: Renders the template and supplies the special tokens it names.
        source: The template.

    Attributes:
        source: See above.

    Raises:
        StartupError: The template does not parse.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
        self._tokenizer = tokenizer
        self.source = source
        # Many templates print any role they are given; a model that was trained for one is another matter.
        self._names_developer = "developer" in source
        self._takes_system = self._takes("system")

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] = (),
        options: ChatOptions = DEFAULT_CHAT,
    ) -> str:
        """The conversation as text, ending where the assistant is to speak, or to go on.

        Args:
            messages: What was said.
            tools: Functions that the assistant may call; the template must know of them.
            options: What else the template is told.

        Raises:
            InvalidRequest: The template refuses the messages, or would leave one of them out.
        """
        chat = [_plain(message, index) for index, message in enumerate(messages)]
        roles = {message["role"] for message in chat}
        if roles <= _EVERY_TEMPLATE_TAKES:
            return self._run(chat, tools, options)
        if not self._names_developer:
            chat = [_as_system(message) for message in chat]
        if "developer" not in roles or not self._names_developer:
            return self._render_whole(chat, tools, options)
        try:
            return self._render_whole(chat, tools, options)
        except InvalidRequest:
            return self._render_whole([_as_system(message) for message in chat], tools, options)

    def _render_whole(self, chat: Sequence[Message], tools: Sequence[Message], options: ChatOptions) -> str:
        """Renders, and refuses where the template would not show every message."""
        try:
            text = self._run(chat, tools, options)
            lost = self._lost_roles(chat, tools, options)
        except InvalidRequest as error:
            if self._takes_system or not _has_instruction(chat):
                raise
            raise InvalidRequest(f"{_NO_INSTRUCTION} ({error})", "messages") from error
        if lost & _INSTRUCTIONS and not self._takes_system:
            raise InvalidRequest(_NO_INSTRUCTION, "messages")
        if lost:
            raise InvalidRequest(
                f"the model's chat template leaves out messages of role {', '.join(sorted(lost))} "
                "in this conversation: move their content into a user message",
                "messages",
            )
        return text

    def _lost_roles(
        self,
        chat: Sequence[Message],
        tools: Sequence[Message] = (),
        options: ChatOptions = DEFAULT_CHAT,
    ) -> frozenset[str]:
        """Roles of messages that the template does not show.

        Each content is replaced by a mark of its own, since a real one may occur elsewhere too. An
        assistant's stays: some templates read it, and some rightly show its tool calls in its place.
        """
        marks = {
            index: f"message-{index}-mark"
            for index, message in enumerate(chat)
            if message["role"] != "assistant"
        }
        text = self._run(
            [{**message, "content": marks.get(i, message["content"])} for i, message in enumerate(chat)],
            tools,
            options,
        )
        shown = set(_MARK.findall(text))
        return frozenset(str(chat[index]["role"]) for index, mark in marks.items() if mark not in shown)

    def _takes(self, role: str) -> bool:
        try:
            return not self._lost_roles(
                [{"role": role, "content": "Be brief."}, {"role": "user", "content": "Hello"}]
            )
        except InvalidRequest:
            return False

    def _run(self, chat: Sequence[Message], tools: Sequence[Message], options: ChatOptions) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(chat),
                # Templates ask whether there are any by whether it is null.
                tools=list(tools) or None,
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=not options.continues,
                continue_final_message=options.continues,
                **options.template_kwargs,
            )
        except jinja2.TemplateSyntaxError as error:
            raise StartupError(
                f"the chat template does not parse: {error.message} (line {error.lineno})"
            ) from error
        # A template is a program: it raises whatever it likes at messages it was not written for.
        except Exception as error:
            raise InvalidRequest(
                f"the model's chat template refuses the messages: {error}", "messages"
            ) from error
        return text


_NO_INSTRUCTION = (
    "the model's chat template takes no system or developer messages: "
    "put the instruction into the first user message"
)


def _has_instruction(chat: Sequence[Message]) -> bool:
    return any(message["role"] in _INSTRUCTIONS for message in chat)


def _as_system(message: Message) -> Message:
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _plain(message: Mapping[str, object], index: int) -> Message:
    """The message with its content as one string, which is what every template can read."""
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(f"messages[{index}] must have a role, got {message.get('role')!r}", "messages")
    content = message.get("content")
    if content is None:
        text = ""
    elif isinstance(content, str):
        text = content
    elif isinstance(content, Sequence):
        text = "".join(_part_text(part, f"messages[{index}].content[{n}]") for n, part in enumerate(content))
    else:
        raise InvalidRequest(
            f"messages[{index}].content must be text or a list of text parts, got {type(content).__name__}",
            "messages",
        )
    return {**message, "content": text}


def _part_text(part: object, where: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise InvalidRequest(f"{where}: only parts of type 'text' are served, got {kind!r}", "messages")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text must be a string, got {type(text).__name__}", "messages")
    return text
