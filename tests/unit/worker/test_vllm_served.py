"""A plain `vllm serve` as the engine: its command, and what its answers mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isthmus_core.config import parse_config
from isthmus_core.errors import ConfigError, InternalError, InvalidRequest
from isthmus_core.keys import RequestKey
from isthmus_worker.engine import EngineRequest, RequestType, Sampling, TokenLogprobs, Tokens
from isthmus_worker.scheduler.events import RequestFinished, RequestTokens
from isthmus_worker.vllm_engine.adapters import Adapter
from isthmus_worker.vllm_engine.model import ModelIdentity
from isthmus_worker.vllm_engine.outputs import LegOutput
from isthmus_worker.vllm_engine.serve_command import serve_command
from isthmus_worker.vllm_engine.served import request_body
from isthmus_worker.vllm_engine.served_answers import Answers, metric_values, refusal, whole

IDENTITY = ModelIdentity(b"w", b"a")
KEY = RequestKey(1 << 50)
SERVE = ["/v/vllm", "serve", "--port", "7201"]


def config(*serve: str, dtype: str = "float32", **engine: Any) -> Any:
    return parse_config(
        {
            "model": {"path": "/models/m", "name": "m", "dtype": dtype},
            "worker": {"role": "context"},
            "engine": {"kind": "vllm", "serve": list(serve or SERVE), **engine},
        }
    )


def test_the_command_gets_what_the_worker_decides():
    made = serve_command(
        config(max_model_len=512, vllm={"enforce_eager": True, "block_size": 32}), IDENTITY, "ipc:///x"
    )
    argv = list(made.argv)
    assert argv[:3] == ["/v/vllm", "serve", "/models/m"]
    assert "--enable-scale-out" in argv
    for flags in (
        ["--port", "7201"],
        ["--dtype", "float32"],
        ["--served-model-name", "m"],
        ["--max-model-len", "512"],
        ["--block-size", "32"],
        ["--enable-prefix-caching"],
        ["--enforce-eager"],
    ):
        assert argv[argv.index(flags[0]) :][: len(flags)] == flags
    assert '"kv_role": "kv_producer"' in argv[argv.index("--kv-transfer-config") + 1]
    assert '"endpoint": "ipc:///x"' in argv[argv.index("--kv-events-config") + 1]
    assert not {"--model", "--skip-tokenizer-init", "--no-disable-log-stats"} & set(argv)
    assert (made.url, made.api_key, made.model) == ("http://127.0.0.1:7201", "", Path("/models/m"))


def test_a_host_a_key_and_adapters():
    identity = ModelIdentity(b"w", b"a", (Adapter("poet", Path("/models/poet"), 1, 8, b"d"),))
    made = serve_command(config(*SERVE, "--host=0.0.0.0", "--api-key", "secret"), identity, "ipc:///x")
    assert (made.url, made.api_key) == ("http://127.0.0.1:7201", "secret")
    argv = list(made.argv)
    assert argv[argv.index("--lora-modules") + 1] == "poet=/models/poet"
    assert "--enable-lora" in argv
    assert "--no-enable-prefix-caching" in serve_command(config(prefix_caching=False), IDENTITY, "ipc:///x").argv


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (config("vllm", "--port", "1"), r"engine\.serve = .*: begin with vllm, serve"),
        (config("vllm", "serve"), r"engine\.serve = .*: name the port"),
        (config(*SERVE, "--dtype", "half"), r"engine\.serve: --dtype: set model\.dtype instead"),
        (config(*SERVE, "--no-enable-prefix-caching"), r"engine\.serve: .*prefix-caching: set engine\.prefix_caching"),
        (config(*SERVE, "--block-size=16", vllm={"block_size": 32}), r"--block-size: is in engine\.vllm too"),
        (config(dtype="auto"), r"model\.dtype = auto: with engine\.serve write float32"),
    ],
)
def test_a_command_that_can_not_be_completed(made: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        serve_command(made, IDENTITY, "ipc:///x")


def request(kind: RequestType, **sampling: Any) -> EngineRequest:
    return EngineRequest(KEY, kind, (1, 2, 3), Sampling(8, **sampling), cache_salt=b"s")


def test_a_request():
    leg = request(RequestType.CONTEXT_ONLY)
    body = request_body(leg, [1, 2, 3], 0, "n", alone=False)
    assert (body["request_id"], body["token_ids"], body["cache_salt"]) == ("n", [1, 2, 3], "isthmus-73")
    assert body["sampling_params"]["max_tokens"] == 1
    assert "kv_transfer_params" in body
    assert "kv_transfer_params" not in request_body(leg, [1, 2, 3], 0, "n", alone=True)


def test_a_stream_becomes_the_events_of_a_leg():
    leg = LegOutput(request(RequestType.CONTEXT_AND_GENERATION, logprobs=1))
    answers, events = Answers(), list[Any]()
    logprobs = (
        '{"content":[{"token_id":5,"logprob":-0.5,"rank":2,"top_logprobs":'
        '[{"token_id":5,"logprob":-0.5,"rank":2},{"token_id":9,"logprob":-0.25,"rank":1}]}]}'
    )
    for line in (
        ": comment",
        "",
        f'data: {{"choices":[{{"index":0,"logprobs":{logprobs},"finish_reason":null,"token_ids":[5]}}]}}',
        'data: {"choices":[{"index":0,"logprobs":null,"finish_reason":"length","token_ids":[]}]}',
        'data: {"choices":[],"usage":{"prompt_tokens_details":{"cached_tokens":2}}}',
        "data: [DONE]",
    ):
        for output in answers.line(line):
            events += leg.events(output)
    first, last, end = events
    assert first == RequestTokens(KEY, Tokens((5,), 0, (TokenLogprobs(-0.5, ((9, -0.25),)),)))
    assert isinstance(last, RequestTokens)
    assert isinstance(end, RequestFinished)
    assert end.report.cached_tokens == 2


def test_an_answer_in_one_piece_says_that_the_blocks_are_offered():
    said = {
        "choices": [{"index": 0, "token_ids": [7], "finish_reason": "length"}],
        "usage": {"prompt_tokens_details": None},
        "kv_transfer_params": {"x": 1},
    }
    output = whole(said)
    assert (output.outputs[0].token_ids, output.kv_transfer_params) == ((7,), {"x": 1})
    with pytest.raises(InternalError, match="without 'choices'"):
        whole({})


def test_an_error_ends_the_leg_and_nonsense_the_front():
    answers = Answers()
    (failed,) = answers.line('data: {"error": {"message": "no"}}')
    with pytest.raises(InternalError, match="ended request"):
        LegOutput(request(RequestType.CONTEXT_AND_GENERATION)).events(failed)
    for nonsense in ("data: {", "data: []", "data: {}"):
        with pytest.raises(InternalError, match="vllm serve answered"):
            answers.line(nonsense)


def test_a_status_is_the_request_s_fault_or_the_server_s():
    refused = refusal(400, '{"error": {"message": "too long"}}')
    assert isinstance(refused, InvalidRequest)
    assert "too long" in str(refused)
    assert isinstance(refusal(503, "busy"), InternalError)


def test_load_is_read_from_the_metrics():
    found = metric_values(
        '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 3.0\n'
        '# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{engine="0"} 2.0\n'
        '# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{engine="0"} 0.25\n'
        '# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{block_size="32",num_gpu_blocks="9"} 1.0\n'
    )
    assert (found.running, found.waiting, found.usage) == (3, 2, 0.25)
    assert found.labels == {"block_size": "32", "num_gpu_blocks": "9"}
