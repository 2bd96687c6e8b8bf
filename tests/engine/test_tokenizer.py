import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from tokenizers import AddedToken, decoders
from transformers import PreTrainedTokenizerFast

from engine.errors import InvalidRequest, ModelNotSupported, StartupError
from engine.tokenizer import Tokenizer
from tests.engine.vocabularies import (
    GEMMA_DECODER,
    LLAMA_DECODER,
    METASPACE_DECODER,
    byte_ids,
    ids,
    sentencepiece_tokenizer,
    word_tokenizer,
)
from tests.tiny import BOS, EOS, IM_END, byte_tokenizer

Message = dict[str, object]

TEXT = "Hello, wörld!\n\n  你好 🙂 ř"


def test_byte_level_round_trip() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    assert tokenizer.encode(TEXT) == list(TEXT.encode())
    assert tokenizer.decode(list(TEXT.encode()), skip_special_tokens=True) == TEXT
    assert b"".join(map(tokenizer.token_bytes, TEXT.encode())) == TEXT.encode()


def test_every_byte_is_exact() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    assert [tokenizer.token_bytes(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert tokenizer.token_text(ord("a")) == "a"
    assert tokenizer.token_text(0xE4) == "\ufffd"


def test_special_tokens_are_shown_or_skipped() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    token_ids = [BOS, ord("h"), IM_END, ord("i"), EOS]
    assert tokenizer.special_ids == {BOS, EOS, IM_END}
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == "hi"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "<bos>h<|im_end|>i<eos>"
    assert tokenizer.token_bytes(IM_END) == b"<|im_end|>"
    assert tokenizer.encode("h<|im_end|>") == [ord("h"), IM_END]


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    assert tokenizer.token_bytes(5000) == b""
    assert tokenizer.decode([ord("h"), 5000, ord("i")], skip_special_tokens=False) == "hi"


@pytest.mark.parametrize(
    "make",
    [
        byte_tokenizer,
        lambda: sentencepiece_tokenizer(LLAMA_DECODER),
        lambda: sentencepiece_tokenizer(GEMMA_DECODER),
        lambda: sentencepiece_tokenizer(METASPACE_DECODER),
        lambda: word_tokenizer(decoders.WordPiece(cleanup=False), ["[UNK]", "un", "##able", "to"]),
        lambda: word_tokenizer(decoders.BPEDecoder(suffix="</w>"), ["<unk>", "lo", "wer</w>", "the</w>"]),
        lambda: word_tokenizer(None, ["<unk>", "one", "two"]),
    ],
    ids=["byte-level", "llama", "gemma", "metaspace", "wordpiece", "bpe-suffix", "no-decoder"],
)
def test_decodes_as_the_backend_does(make: Callable[[], PreTrainedTokenizerFast]) -> None:
    wrapped = make()
    tokenizer = Tokenizer(wrapped)
    random = Random(1)
    # A run of byte tokens that is no text is spelled in two ways: see the next test.
    known = [i for i in range(len(wrapped)) if not wrapped.convert_ids_to_tokens(i).startswith("<0x")]
    for _ in range(100):
        token_ids = random.choices(known, k=random.randrange(1, 12))
        for skip in (True, False):
            assert tokenizer.decode(token_ids, skip_special_tokens=skip) == wrapped.decode(
                token_ids, skip_special_tokens=skip
            ), token_ids


def test_sentencepiece_bytes() -> None:
    wrapped = sentencepiece_tokenizer()
    tokenizer = Tokenizer(wrapped)
    hello, space, tool, end = ids(wrapped, "▁Hello", "▁", "<tool>", "<end>")
    assert tokenizer.token_bytes(hello) == b" Hello"
    assert tokenizer.token_text(hello) == " Hello"
    assert tokenizer.leading_bytes(hello) == b"Hello"
    assert tokenizer.token_bytes(space) == b" "
    assert tokenizer.token_bytes(byte_ids("你")[0]) == b"\xe4"
    assert (tokenizer.token_bytes(tool), tokenizer.token_bytes(end)) == (b"<tool>", b"<end>")
    assert tokenizer.decode([hello, *byte_ids("你🙂"), hello], skip_special_tokens=True) == "Hello你🙂 Hello"
    # A whole character stays whole beside a cut one.
    assert tokenizer.decode([hello, *byte_ids("你🙂")[:-1]], skip_special_tokens=True) == "Hello你\ufffd"


def test_leading_space_is_kept_where_the_decoder_keeps_it() -> None:
    wrapped = sentencepiece_tokenizer(GEMMA_DECODER)
    assert Tokenizer(wrapped).decode(ids(wrapped, "▁Hello"), skip_special_tokens=True) == " Hello"


def test_clean_up_of_spaces_takes_nothing_back() -> None:
    wrapped = word_tokenizer(None, ["<unk>", "wait", "!"])
    wrapped.clean_up_tokenization_spaces = True
    assert wrapped.decode([1, 2]) == "wait!"
    assert Tokenizer(wrapped).decode([1, 2], skip_special_tokens=True) == "wait !"


def test_truncation_and_padding_are_off() -> None:
    wrapped = byte_tokenizer()
    wrapped.backend_tokenizer.enable_truncation(4)
    wrapped.backend_tokenizer.enable_padding(length=64)
    assert Tokenizer(wrapped).encode("a" * 10) == [ord("a")] * 10


def test_threads_share_one_tokenizer() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    texts = [f"{TEXT} {number}" * 20 for number in range(40)]
    with ThreadPoolExecutor(4) as pool:
        encoded = list(pool.map(tokenizer.encode, texts))
        decoded = list(
            pool.map(lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True), encoded)
        )
    assert decoded == texts


@pytest.mark.parametrize("text", ["\ud800", "fine \udc00 not"])
def test_half_a_surrogate_pair_is_refused(text: str) -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    with pytest.raises(InvalidRequest, match="surrogate") as error:
        tokenizer.encode(text)
    assert error.value.param == "prompt"
    with pytest.raises(InvalidRequest, match="surrogate") as error:
        tokenizer.apply_chat_template([{"role": "user", "content": text}])
    assert error.value.param == "messages"


def test_slow_tokenizers_are_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(ModelNotSupported, match=r"Slow has no fast .* tokenizer.json"):
        Tokenizer(Slow())


def test_special_in_the_tokenizer_but_not_in_the_backend() -> None:
    wrapped = byte_tokenizer()
    wrapped.backend_tokenizer.add_tokens([AddedToken("<note>", special=False)])
    note = wrapped.convert_tokens_to_ids("<note>")
    assert note not in Tokenizer(wrapped).special_ids
    wrapped.add_special_tokens({"pad_token": "<pad>"})
    assert wrapped.pad_token_id in Tokenizer(wrapped).special_ids


# Chat templates

PASSES_ANY_ROLE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
IGNORES_UNKNOWN = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}"
    "[{{ m.role }}]{{ m.content | trim }}{% endif %}{% endfor %}[assistant]"
)
REFUSES_UNKNOWN = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('Unknown role ' + m.role) }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
)
REFUSES_SYSTEM = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
)
IGNORES_SYSTEM = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}[{{ m.role }}]{{ m.content }}{% endif %}"
    "{% endfor %}[assistant]"
)
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}{{ m.content }}{% endfor %}"
)
DEVELOPER: Message = {"role": "developer", "content": "Answer only: BLUE"}
SYSTEM: Message = {"role": "system", "content": "Answer only: BLUE"}
USER: Message = {"role": "user", "content": "Sky?"}


def rendered(template: str, *messages: Message) -> str:
    tokenizer = Tokenizer(byte_tokenizer(), chat_template=template)
    return tokenizer.decode(tokenizer.apply_chat_template(messages), skip_special_tokens=False)


def test_the_models_own_template_is_used_unless_another_is_given() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    assert tokenizer.has_chat_template
    assert tokenizer.apply_chat_template([USER]) == [*b"user:Sky?", IM_END, *b"assistant:"]
    assert rendered(PASSES_ANY_ROLE, USER) == "[user]Sky?[assistant]"


def test_no_template() -> None:
    wrapped = byte_tokenizer()
    wrapped.chat_template = None
    tokenizer = Tokenizer(wrapped)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template") as error:
        tokenizer.apply_chat_template([USER])
    assert error.value.param == "messages"


def test_default_of_several_templates() -> None:
    wrapped = byte_tokenizer()
    wrapped.chat_template = {"default": PASSES_ANY_ROLE, "rag": "{{ documents }}"}
    tokenizer = Tokenizer(wrapped)
    assert tokenizer.apply_chat_template([USER]) == list(b"[user]Sky?[assistant]")


def test_of_several_templates_one_is_for_tools() -> None:
    wrapped = byte_tokenizer()
    wrapped.chat_template = {
        "default": "{{ messages[0].content }}",
        "tool_use": "{{ tools[0].name }}>{{ messages[0].content }}",
        "rag": "{{ documents }}",
    }
    tokenizer = Tokenizer(wrapped)
    assert tokenizer.apply_chat_template([USER], [{"name": "clock"}]) == list(b"clock>Sky?")
    assert tokenizer.apply_chat_template([USER]) == list(b"Sky?")
    assert tokenizer.tool_template.startswith("{{ tools")
    own = Tokenizer(wrapped, chat_template="{{ tools | length }}")
    assert own.apply_chat_template([USER], [{"name": "clock"}]) == list(b"1")
    assert own.tool_template == Tokenizer(byte_tokenizer()).tool_template == ""


def test_developer_stays_where_the_template_names_it() -> None:
    template = "{# takes system, developer, user #}" + PASSES_ANY_ROLE
    assert rendered(template, DEVELOPER, USER) == "[developer]Answer only: BLUE[user]Sky?[assistant]"


def test_a_text_is_encoded_without_the_global_lock() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            ticks.append(time.perf_counter())

    clock = threading.Thread(target=tick)
    clock.start()
    began = time.perf_counter()
    tokenizer.encode("a b " * 300_000)
    ended = time.perf_counter()
    done.set()
    clock.join()
    # Handing out the ids takes the lock for a moment; the encoding before it must not.
    assert sum(began < tick < ended for tick in ticks) >= 10


@pytest.mark.parametrize("template", [IGNORES_UNKNOWN, REFUSES_UNKNOWN, PASSES_ANY_ROLE])
def test_developer_becomes_system_where_the_template_lacks_it(template: str) -> None:
    assert rendered(template, DEVELOPER, USER) == "[system]Answer only: BLUE[user]Sky?[assistant]"
    assert rendered(template, USER, DEVELOPER) == "[user]Sky?[system]Answer only: BLUE[assistant]"


def test_developer_is_not_taken_for_shown_because_its_words_occur_elsewhere() -> None:
    repeats: Message = {"role": "user", "content": "He said: Answer only: BLUE"}
    assert rendered(IGNORES_UNKNOWN, DEVELOPER, repeats).startswith("[system]Answer only: BLUE[user]He said")


@pytest.mark.parametrize("template", [REFUSES_SYSTEM, IGNORES_SYSTEM])
@pytest.mark.parametrize("instruction", [DEVELOPER, SYSTEM])
def test_template_without_instructions_refuses_them(template: str, instruction: Message) -> None:
    with pytest.raises(InvalidRequest, match="takes no system or developer messages") as error:
        rendered(template, instruction, USER)
    assert error.value.param == "messages"
    assert rendered(template, USER) == "[user]Sky?[assistant]"


def test_refusal_carries_the_templates_own_words() -> None:
    with pytest.raises(InvalidRequest, match="System role not supported"):
        rendered(REFUSES_SYSTEM, SYSTEM, USER)
    with pytest.raises(InvalidRequest, match="Roles must alternate user/assistant") as error:
        rendered(ALTERNATES, USER, USER)
    assert error.value.param == "messages"


def test_other_roles_are_not_dropped_either() -> None:
    tool: Message = {"role": "tool", "content": "42", "tool_call_id": "1"}
    with pytest.raises(InvalidRequest, match="leaves out messages of role tool"):
        rendered(IGNORES_UNKNOWN, USER, tool)


def test_system_that_only_some_places_allow_is_not_called_unsupported() -> None:
    first_only = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must come first') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(InvalidRequest, match="System message must come first") as error:
        rendered(first_only, USER, SYSTEM)
    assert "takes no system" not in str(error.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content.nothing.there }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{{ [][5].x }}",
    ],
)
def test_a_template_that_breaks_is_the_requests_error(template: str) -> None:
    with pytest.raises(InvalidRequest, match=r"chat template refuses the messages: .+") as error:
        rendered(template, USER)
    assert error.value.param == "messages"


def test_an_empty_conversation_is_refused() -> None:
    with pytest.raises(InvalidRequest) as error:
        rendered(PASSES_ANY_ROLE)
    assert error.value.param == "messages"


def test_template_that_does_not_parse_is_refused_at_start() -> None:
    with pytest.raises(StartupError, match=r"does not parse: .*line 2"):
        Tokenizer(byte_tokenizer(), chat_template="{{ messages }}\n{% for %}")


def test_sandbox_holds() -> None:
    with pytest.raises(InvalidRequest):
        rendered("{{ messages.__class__.__mro__[1].__subclasses__() }}", USER)


def test_content_parts_are_joined() -> None:
    parts: Message = {
        "role": "user",
        "content": [{"type": "text", "text": "Sk"}, {"type": "text", "text": "y?"}],
    }
    assert rendered(PASSES_ANY_ROLE, parts) == "[user]Sky?[assistant]"


def test_content_none_is_empty() -> None:
    silent: Message = {"role": "assistant", "content": None, "tool_calls": []}
    assert rendered(PASSES_ANY_ROLE, USER, silent, USER) == "[user]Sky?[assistant][user]Sky?[assistant]"


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, r"content\[0\].*'image_url'"),
        ({"role": "user", "content": ["Sky?"]}, r"content\[0\].*'str'"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, r"content\[0\]\.text must be a string"),
        ({"role": "user", "content": 5}, r"messages\[0\]\.content must be text"),
        ({"content": "Sky?"}, r"messages\[0\] must have a role"),
        ({"role": 1, "content": "Sky?"}, r"messages\[0\] must have a role"),
    ],
)
def test_messages_of_another_form_are_refused(message: Message, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint) as error:
        rendered(PASSES_ANY_ROLE, message)
    assert error.value.param == "messages"
