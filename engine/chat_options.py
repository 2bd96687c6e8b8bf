"""ChatOptions: how a request wants its conversation rendered."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a chat template is told beside the messages.

    Attributes:
        continues: The last message is the beginning of the answer, which goes on where it ends.
        template_kwargs: Variables that the model's template knows, such as enable_thinking.
    """

    continues: bool = False
    template_kwargs: Mapping[str, object] = field(default_factory=dict)


DEFAULT_CHAT = ChatOptions()
