"""What transformers says about a checkpoint, token for token, greedy and seeded; kept from run to run.

Seeded tokens are drawn from transformers' logits with the rule of the API (a pure function of seed, sample and
position), by the plain code of `sampling_oracle`.
"""

# torch and transformers are typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from greedy_driver import open_oracle
from isthmus_worker.engine import Sampling
from sampling_oracle import changed, distribution, draw, random_number

NEW_TOKENS = 16
SEED = 1234


@dataclass(frozen=True)
class Case:
    """One request and how its tokens are chosen. `reuse`: as many tokens of the prompt are those of the case before."""

    prompt: tuple[int, ...]
    seeded: bool
    new_tokens: int = NEW_TOKENS
    options: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def sampling(self) -> Sampling:
        """As the engine takes it."""
        if not self.seeded:
            return Sampling(self.new_tokens)
        return Sampling(self.new_tokens, temperature=0.8, top_p=0.9, top_k=40, seed=SEED)


def cases(
    vocab: int, lengths: tuple[int, ...] = (21, 75, 140), new_tokens: int = NEW_TOKENS, draw: int = 7
) -> list[Case]:
    """Random prompts, others for another `draw`; each greedy and seeded, the greedy ones first."""
    rng = np.random.default_rng(draw)
    prompts = [tuple(rng.integers(4, vocab, length).tolist()) for length in lengths]
    return [Case(prompt, seeded, new_tokens) for seeded in (False, True) for prompt in prompts]


def expected(folder: Path, wanted: list[Case]) -> list[list[int]]:
    """The tokens of each case; computed once for a checkpoint, a version of transformers and a list of cases."""
    path = _cache_file(folder, wanted)
    if path.is_file():
        return json.loads(path.read_text())
    model = open_oracle(folder)
    found = [_tokens(model, case) for case in wanted]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(found))
    part.replace(path)
    return found


def checkpoint_digest(folder: Path) -> str:
    """Over configuration and weights."""
    digest = xxhash.xxh3_128()
    for path in sorted((*folder.glob("*.safetensors"), folder / "config.json")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _cache_file(folder: Path, wanted: list[Case]) -> Path:
    from importlib.metadata import version

    key = xxhash.xxh3_64_hexdigest(json.dumps([asdict(case) for case in wanted]).encode())
    root = Path(os.environ.get("ISTHMUS_CACHE") or Path.home() / ".cache" / "isthmus")
    return root / "oracles" / f"{checkpoint_digest(folder)}-{version('transformers')}-{key}.json"


def _tokens(model: object, case: Case) -> list[int]:
    import torch

    tokens, sampling = list(case.prompt), case.sampling
    cache, ids = None, torch.tensor([tokens])
    while len(tokens) < len(case.prompt) + case.new_tokens:
        with torch.inference_mode():
            out = model(input_ids=ids, past_key_values=cache, use_cache=True)  # type: ignore[operator]
        cache, logits = out.past_key_values, out.logits[0, -1].float().numpy()
        output = tokens[len(case.prompt) :]
        if case.seeded:
            shares = distribution(changed(logits, sampling, case.prompt, output), sampling)
            token = draw(shares, random_number(SEED, 0, len(tokens)))
        else:
            token = int(logits.argmax())
        tokens.append(token)
        ids = torch.tensor([[token]])
    return tokens[len(case.prompt) :]
