"""The fill gate: nothing is decoded before so many caches are here, and again after the instance was idle."""

from __future__ import annotations

import pytest

from isthmus_core.config import IsthmusConfig
from isthmus_core.errors import ConfigError
from isthmus_worker.engine_process.build import build_scheduler
from isthmus_worker.engine_process.load import load_model
from sched_bench import Bench


def test_decoding_waits_until_the_gate_is_full():
    bench = Bench("generation", fill_gate=3)
    keys = [bench.submit(list(range(40, 50)), 4) for _ in range(3)]
    bench.run()
    for number, key in enumerate(keys):
        assert all(not bench.trails[one].tokens[1:] for one in keys), f"{number} of 3 caches are here"
        bench.deliver_receive(key)
        bench.run()
    assert [len(bench.trails[key].tokens) for key in keys] == [3, 3, 3]


def test_a_gate_that_was_open_stays_open_until_the_instance_is_idle():
    bench = Bench("generation", fill_gate=2)
    first = [bench.submit(list(range(40, 50)), 60) for _ in range(2)]
    bench.run()
    for key in first:
        bench.deliver_receive(key)
    bench.step()
    late = bench.submit(list(range(50, 60)), 4)
    bench.step()
    bench.deliver_receive(late)
    bench.run()
    assert bench.trails[late].reason is not None
    bench.scheduler.check_idle()
    again = bench.submit(list(range(40, 50)), 4)
    bench.run()
    bench.deliver_receive(again)
    bench.run()
    assert bench.trails[again].reason is None


def test_a_gate_that_can_never_be_full_is_refused():
    config = IsthmusConfig.model_validate(
        {
            "model": {"name": "mock"},
            "engine": {"kind": "mock", "max_running": 4, "num_blocks": 8},
            "transfer": {"fill_gate": 5},
        }
    )
    with pytest.raises(ConfigError, match=r"transfer.fill_gate = 5: no more than engine.max_running = 4"):
        build_scheduler(config, load_model(config), lambda _: None, None)
