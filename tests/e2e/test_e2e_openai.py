"""The OpenAI surface on real processes, split and unsplit: what is asked for arrives, and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from cluster import MOCK, assert_idle, running_cluster
from isthmus_client import Client
from isthmus_client.supervisor import LocalCluster
from isthmus_worker.engine import Sampling
from mock_oracle import oracle

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]
UNSPLIT = replace(MOCK, context=0, generation=0, unsplit=1)
PROMPT = "The quick brown fox"


@pytest_asyncio.fixture(loop_scope="module", scope="module", name="cluster", params=["split", "unsplit"])
async def _cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[LocalCluster, None]:
    options = replace(MOCK if request.param == "split" else UNSPLIT, base={"engine": {"mock": {"decode_us": 500}}})
    async with running_cluster(options, tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def _nothing_left(cluster: LocalCluster) -> AsyncGenerator[None, None]:
    yield
    await assert_idle(cluster)


@pytest_asyncio.fixture(loop_scope="module", name="client")
async def _client(cluster: LocalCluster) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    url = f"{cluster.http_endpoint}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=http) as client:
        yield client


def expected(count: int, sample: int = 0, prompt: str = PROMPT, **sampling: Any) -> str:
    made = Sampling(max_tokens=count, **sampling) if sampling else None
    return bytes(oracle(list(prompt.encode()), count, sampling=made, sample=sample)).decode()


async def streamed(client: openai.AsyncOpenAI, count: int, **options: Any) -> list[str]:
    texts = [""] * count
    async for chunk in await client.completions.create(**{"model": "mock", "stream": True, **options}):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    return texts


async def test_seeded_answers_are_what_the_seed_says(client: openai.AsyncOpenAI):
    options: Any = {"prompt": PROMPT, "max_tokens": 20, "temperature": 1, "seed": 5, "n": 3}
    right = [expected(20, sample, temperature=1.0, seed=5) for sample in range(3)]
    assert len(set(right)) == 3
    assert await streamed(client, 3, **options) == right
    answer = await client.completions.create(model="mock", **options)
    assert [choice.text for choice in answer.choices] == right


async def test_without_a_seed_answers_differ(client: openai.AsyncOpenAI):
    texts = [(await streamed(client, 1, prompt=PROMPT, max_tokens=20, temperature=1))[0] for _ in range(2)]
    assert texts[0] != texts[1]


async def test_a_stop_string_ends_one_answer_and_the_others_go_on(client: openai.AsyncOpenAI):
    full = [expected(30, sample, temperature=1.0, seed=9) for sample in range(3)]
    stop = full[1][4:7]
    right = [text.split(stop)[0] for text in full]
    assert [len(text) < 30 for text in right] == [False, True, False]
    options: Any = {"prompt": PROMPT, "max_tokens": 30, "temperature": 1, "seed": 9, "n": 3, "stop": [stop]}
    assert await streamed(client, 3, **options) == right
    answer = await client.completions.create(model="mock", **options)
    assert [choice.finish_reason for choice in answer.choices] == ["length", "stop", "length"]


@pytest.mark.parametrize("at", [0, 1, 6])
async def test_a_stop_string_that_ends_everything_ends_the_work(client: openai.AsyncOpenAI, at: int):
    full = expected(2000)
    stop = full[at : at + 2]
    answer = await client.completions.create(model="mock", prompt=PROMPT, max_tokens=2000, stop=stop)
    assert answer.choices[0].text == full.split(stop)[0]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == full.index(stop) + 2


async def test_a_stop_token_at_the_first_position_needs_no_hand_off(cluster: LocalCluster):
    first = expected(1).encode()[0]
    async with Client(cluster.grpc_endpoint) as client:
        answer = await client.answer(PROMPT, max_tokens=50, stop_token_ids=[first], timeout_s=60)
    assert (answer.text, answer.reason, answer.stopped_by) == ("", "stop", first)
    assert answer.end.timeline.handoff is None


async def test_bias_and_least_tokens_change_what_is_said(client: openai.AsyncOpenAI):
    full = expected(10)
    never = full.encode()[0]
    answer = await client.completions.create(
        model="mock", prompt=PROMPT, max_tokens=10, temperature=0, logit_bias={str(never): -100}
    )
    assert answer.choices[0].text == expected(10, logit_bias=((never, -100.0),))
    stop = {"stop_token_ids": [never], "min_tokens": 5}
    kept = await client.completions.create(model="mock", prompt=PROMPT, max_tokens=10, extra_body=stop)
    right = expected(10, stop_token_ids=(never,), min_tokens=5)
    assert kept.choices[0].text == (right[:5] + right[5:].split(chr(never))[0])


async def test_log_probabilities_come_with_every_token(client: openai.AsyncOpenAI):
    messages: Any = [{"role": "user", "content": "x"}]
    answer = await client.chat.completions.create(
        model="mock", messages=messages, max_tokens=12, n=2, logprobs=True, top_logprobs=3
    )
    for choice in answer.choices:
        assert choice.logprobs is not None
        content = choice.logprobs.content or []
        assert "".join(entry.token for entry in content) == choice.message.content
        assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in content)


async def test_cached_prompts_are_counted_and_salts_keep_them_apart(client: openai.AsyncOpenAI):
    prompt = "A prompt of several blocks. " * 8

    async def cached(salt: str) -> int:
        answer = await client.completions.create(
            model="mock", prompt=prompt, max_tokens=3, extra_body={"cache_salt": salt}
        )
        assert answer.choices[0].text == expected(3, prompt=prompt)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert await cached("a") == 0
    assert await cached("a") >= 16
    assert await cached("b") == 0


@pytest.mark.parametrize("options", [{"n": 4}, {"prompt": [PROMPT] * 6}, {"prompt": [PROMPT] * 3, "n": 3}])
async def test_a_client_that_leaves_takes_all_its_answers_along(client: openai.AsyncOpenAI, options: dict[str, Any]):
    asked = {"model": "mock", "prompt": PROMPT, "max_tokens": 4000, "stream": True, **options}
    stream: Any = await client.completions.create(**asked)
    seen: set[int] = set()
    async for chunk in stream:
        seen.add(chunk.choices[0].index)
        if len(seen) > 2:
            break
    await stream.close()


async def test_every_clients_errors_leave_nothing(cluster: LocalCluster):
    bodies: list[Any] = [
        {"prompt": PROMPT, "max_tokens": 9000},
        {"prompt": [PROMPT, ""], "max_tokens": 5},
        {"prompt": PROMPT, "temperature": 3},
        {"prompt": PROMPT, "max_tokens": 4000},
    ]
    async with httpx.AsyncClient(trust_env=False) as http:
        url = f"{cluster.http_endpoint}/v1/completions"
        calls = [http.post(url, json=body, headers={"X-Request-Timeout": "0.5"}) for body in bodies]
        answers = await asyncio.gather(*calls)
    assert [answer.status_code for answer in answers] == [400, 400, 400, 504]


async def test_the_same_over_grpc(cluster: LocalCluster):
    async with Client(cluster.grpc_endpoint) as client:
        answers = await client.answers(PROMPT, max_tokens=20, temperature=1, seed=5, n=3, logprobs=1, timeout_s=60)
        assert [answer.text for answer in answers] == [expected(20, k, temperature=1.0, seed=5) for k in range(3)]
        assert all(len(answer.logprobs) == len(answer.token_ids) == 20 for answer in answers)
        stop = answers[0].text[3:6]
        stopped = await client.answer(PROMPT, max_tokens=20, temperature=1, seed=5, stop=stop, timeout_s=60)
        assert (stopped.text, stopped.stopped_by) == (answers[0].text.split(stop)[0], stop)
        assert await client.detokenize(await client.tokenize(PROMPT)) == PROMPT
