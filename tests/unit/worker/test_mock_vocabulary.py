"""The mock engine with the token ids of a real tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from greedy_driver import GREEDY
from isthmus_core.config import MockConfig, ModelConfig
from isthmus_core.errors import ConfigError
from isthmus_worker.mock_engine import MockRunner, vocabulary
from isthmus_worker.runner import BatchRow
from mock_oracle import oracle


def test_the_folder_says_how_many_ids_there_are(tmp_path: Path):
    assert vocabulary(ModelConfig(name="mock", tokenizer="byte")) == 257
    (tmp_path / "config.json").write_text('{"vocab_size": 49152}')
    assert vocabulary(ModelConfig(path=tmp_path)) == 49152
    assert vocabulary(ModelConfig(path=tmp_path, tokenizer="byte")) == 257


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"vocab_size": "many"}', '{"vocab_size": 126}'])
def test_a_folder_that_does_not_say_is_refused(tmp_path: Path, text: str):
    if text:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        vocabulary(ModelConfig(path=tmp_path))


def test_ids_beyond_bytes_are_taken_and_count():
    prompt = [40_000, 3, 49_151, 257]
    made = MockRunner(MockConfig(max_model_len=64), "mock", 4, vocab_size=49_152)
    made.allocate_cache(4)
    row = BatchRow(np.array(prompt, np.int64), 0, (np.arange(4, dtype=np.int32),), GREEDY)
    assert [drawn[0].token for drawn in made.execute([row])] == oracle(prompt, 1)
    beyond = BatchRow(np.array([49_152], np.int64), 0, row.blocks, GREEDY)
    with pytest.raises(ValueError, match=r"outside \[0, 49152\)"):
        made.execute([beyond])
    assert made.describe().vocab_size == 49_152
    bytes_only = MockRunner(MockConfig(max_model_len=64), "mock", 4)
    assert made.describe().weights_digest != bytes_only.describe().weights_digest
