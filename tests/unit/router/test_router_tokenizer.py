"""Text to ids and back: what a stream shows equals what the whole answer decodes to, wherever tokens cut characters."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from isthmus_core import token_ids
from isthmus_core.config import ModelConfig
from isthmus_core.errors import ConfigError
from isthmus_router.byte_tokenizer import ByteTokenizer
from isthmus_router.chat import Conversation, ToolCall, Turn
from isthmus_router.tokenizer import ChatRefused, Tokenizer, open_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    "<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def byte_level_folder(
    folder: Path, *, template: str | None = TEMPLATE, eos: object = 257, **generation: object
) -> Path:
    """A model folder with a tokenizer whose tokens are single bytes: every character but ASCII is cut."""
    vocab = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "</s>", "bos_token": "<s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 320, "eos_token_id": 257}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos, **generation}))
    return folder


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(ModelConfig(path=byte_level_folder(tmp_path_factory.mktemp("model"))))


def streamed(tokenizer: Tokenizer, ids: list[int], size: int = 1) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("text", ["plain", "héllo", "🎉 party 👩‍👩‍👧", "世界 こんにちは", " leading", "tab\tnew\nline"])
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_characters_cut_over_tokens_stream_whole(fast: Tokenizer, text: str, size: int) -> None:
    for tokenizer in (fast, ByteTokenizer()):
        pieces = streamed(tokenizer, tokenizer.encode(text), size)
        assert "".join(pieces) == text
        assert not any("�" in piece for piece in pieces)


@given(st.text(max_size=40), st.integers(1, 7))
def test_any_text_survives_the_byte_tokenizer(text: str, size: int) -> None:
    tokenizer = ByteTokenizer()
    assert "".join(streamed(tokenizer, tokenizer.encode(text), size)) == text


def test_an_emoji_appears_only_when_its_last_byte_is_there(fast: Tokenizer) -> None:
    assert streamed(fast, fast.encode("🎉")) == ["", "", "", "🎉", ""]


def test_an_answer_that_ends_inside_a_character_shows_the_break_at_the_end(fast: Tokenizer) -> None:
    for tokenizer in (fast, ByteTokenizer()):
        ids = tokenizer.encode("ok 🎉")[:-1]
        pieces = streamed(tokenizer, ids)
        assert "".join(pieces[:-1]) == "ok "
        assert set(pieces[-1]) == {"�"}


def test_special_tokens_have_no_text(fast: Tokenizer) -> None:
    assert "".join(streamed(fast, [256, *fast.encode("hi"), 257])) == "hi"
    assert "".join(streamed(ByteTokenizer(), [104, 105, 256])) == "hi"


def test_chat_goes_through_the_template_and_plain_text_does_not(fast: Tokenizer) -> None:
    ids = fast.encode_chat(Conversation((Turn("user", "hi"),)))
    assert ids == [256, *fast.encode("user:hi"), 257, 256, *fast.encode("assistant:")]


def test_a_conversation_that_the_template_refuses(fast: Tokenizer) -> None:
    with pytest.raises(ChatRefused, match="no system turns"):
        fast.encode_chat(Conversation((Turn("system", "be brief"), Turn("user", "hi"))))


def test_a_model_without_template_says_so(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(ModelConfig(path=byte_level_folder(tmp_path, template=None)))
    with pytest.raises(ChatRefused, match="no chat template"):
        tokenizer.encode_chat(Conversation((Turn("user", "hi"),)))
    assert tokenizer.encode("hi")


FULL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if loud %}LOUD{% endif %}{% for m in messages %}"
    "<s>{{ m.role }}{% if m.name %}={{ m.name }}{% endif %}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}"
    "{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def test_tools_calls_and_template_arguments_reach_the_template(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(ModelConfig(path=byte_level_folder(tmp_path, template=FULL_TEMPLATE)))
    turns = (
        Turn("user", "weather?", name="ann"),
        Turn("assistant", tool_calls=(ToolCall("c1", "get", {"city": "Bern"}),)),
        Turn("tool", "sunny", tool_call_id="c1"),
    )
    tool = {"type": "function", "function": {"name": "get"}}

    def rendered(**changes: object) -> str:
        ids = tokenizer.encode_chat(Conversation(turns, **changes))  # type: ignore[arg-type]
        return tokenizer.decode(ids, skip_special=False)

    body = "<s>user=ann:weather?</s><s>assistant:[get Bern]</s><s>tool:sunny#c1</s>"
    assert rendered() == body + "<s>assistant:"
    assert rendered(add_generation_prompt=False) == body
    assert rendered(arguments={"loud": True}, add_generation_prompt=False) == "LOUD" + body
    assert rendered(tools=(tool,)).startswith('[{"type": "function", "function": {"name": "get"}}]')


def test_the_last_turn_can_be_left_open(fast: Tokenizer) -> None:
    turns = (Turn("user", "hi"), Turn("assistant", "Well, "))
    open_chat = Conversation(turns, add_generation_prompt=False, continue_final_message=True)
    assert fast.decode(fast.encode_chat(open_chat), skip_special=False) == "<s>user:hi</s><s>assistant:Well, "


def test_tokens_have_bytes_of_their_own(fast: Tokenizer) -> None:
    for tokenizer in (fast, ByteTokenizer()):
        for text in ("é🎉", "\n \t"):
            raw = [tokenizer.token_bytes(token) for token in tokenizer.encode(text)]
            assert all(len(piece) == 1 for piece in raw)
            assert b"".join(raw) == text.encode()
    assert fast.token_bytes(257) == b"</s>"
    assert fast.token_bytes(310) == b"", "the vocabulary has padding behind the tokenizer's last token"


def test_no_token_stands_for_more_text_than_the_longest(fast: Tokenizer) -> None:
    assert fast.longest_token == len("</s>")
    assert ByteTokenizer().longest_token == 1


def test_where_text_can_vanish_there_is_no_longest_token(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens([AddedToken("<sep>", rstrip=True)])
    backend.save(str(folder / "tokenizer.json"))
    assert open_tokenizer(ModelConfig(path=folder)).longest_token is None


def test_special_tokens_can_be_shown(fast: Tokenizer) -> None:
    detokenizer = fast.detokenizer(skip_special=False)
    assert "".join(detokenizer.push([token]) for token in [256, *fast.encode("hi"), 257]) == "<s>hi</s>"
    assert ByteTokenizer().decode([104, 256], skip_special=False) == "h<end>"


def test_the_authors_sampling_values_are_the_defaults(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path, temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.1)
    defaults = open_tokenizer(ModelConfig(path=folder)).defaults
    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (0.6, 0.95, 20)
    assert (defaults.min_p, defaults.repetition_penalty) == (None, 1.1)


@pytest.mark.parametrize(("name", "value"), [("temperature", 3), ("top_p", "0.5"), ("top_k", -5), ("min_p", True)])
def test_unusable_sampling_values_of_a_model_are_named(tmp_path: Path, name: str, value: object) -> None:
    folder = byte_level_folder(tmp_path, **{name: value})
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {name}"):
        open_tokenizer(ModelConfig(path=folder))


def test_ids_come_from_the_model_folder(tmp_path: Path, fast: Tokenizer) -> None:
    assert fast.vocab_size == 320
    assert fast.eos_ids == (257,)
    assert open_tokenizer(ModelConfig(path=byte_level_folder(tmp_path, eos=[257, 300]))).eos_ids == (257, 300)


def test_wrong_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path is not set"):
        open_tokenizer(ModelConfig(name="m"))
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        open_tokenizer(ModelConfig(path=tmp_path))
    (tmp_path / "tokenizer.json").write_text("{not json")
    with pytest.raises(ConfigError, match="can not be read"):
        open_tokenizer(ModelConfig(path=tmp_path))


def test_token_ids_travel_as_little_endian_words() -> None:
    assert token_ids.pack([1, 258]) == b"\x01\0\0\0\x02\x01\0\0"
    assert token_ids.unpack(token_ids.pack([0, 2**32 - 1])) == (0, 2**32 - 1)
    with pytest.raises(ValueError, match="5 bytes"):
        token_ids.unpack(b"12345")


def test_a_model_folder_is_served_without_torch(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    code = (
        "import sys, isthmus_router.grpc_server, isthmus_router.worker_client, isthmus_router.http.app\n"
        "from pathlib import Path\n"
        "from isthmus_core.config import ModelConfig\n"
        "from isthmus_router.chat import Conversation, Turn\n"
        "from isthmus_router.tokenizer import open_tokenizer\n"
        "tokenizer = open_tokenizer(ModelConfig(path=Path(sys.argv[1])))\n"
        "text = tokenizer.detokenizer().push(tokenizer.encode_chat(Conversation((Turn('user', 'hi'),))))\n"
        "assert text == 'user:hiassistant:', text\n"
        "heavy = {'torch', 'nixl', 'nixl_cu12', 'kvtransfer'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
