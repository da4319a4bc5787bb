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
from isthmus_router.tokenizer import ChatRefused, Tokenizer, Turn, open_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    "<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def byte_level_folder(folder: Path, *, template: str | None = TEMPLATE, eos: object = 257) -> Path:
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
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
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
    ids = fast.encode_chat([Turn("user", "hi")])
    assert ids == [256, *fast.encode("user:hi"), 257, 256, *fast.encode("assistant:")]


def test_a_conversation_that_the_template_refuses(fast: Tokenizer) -> None:
    with pytest.raises(ChatRefused, match="no system turns"):
        fast.encode_chat([Turn("system", "be brief"), Turn("user", "hi")])


def test_a_model_without_template_says_so(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(ModelConfig(path=byte_level_folder(tmp_path, template=None)))
    with pytest.raises(ChatRefused, match="no chat template"):
        tokenizer.encode_chat([Turn("user", "hi")])
    assert tokenizer.encode("hi")


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
        "from isthmus_router.tokenizer import Turn, open_tokenizer\n"
        "tokenizer = open_tokenizer(ModelConfig(path=Path(sys.argv[1])))\n"
        "text = tokenizer.detokenizer().push(tokenizer.encode_chat([Turn('user', 'hi')]))\n"
        "assert text == 'user:hiassistant:', text\n"
        "heavy = {'torch', 'nixl', 'nixl_cu12', 'kvtransfer'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
