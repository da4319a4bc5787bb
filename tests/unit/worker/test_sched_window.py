"""The admission window for caches that come from elsewhere, what is computed meanwhile, and who has to make room."""

from __future__ import annotations

from isthmus_worker.engine import FinishReason
from isthmus_worker.scheduler import RequestFinished
from kvtransfer.ports import ReceiveRequest
from mock_oracle import oracle
from sched_bench import Bench
from sched_pair import Pair

PROMPT = [65 + at % 9 for at in range(30)]


def credits(bench: Bench) -> int:
    return bench.scheduler.load().receive_credits


def test_credits_are_free_blocks_less_one_for_each_answer_that_decodes():
    pair = Pair(num_blocks=32, prefix_caching=False)
    assert credits(pair.generation) == 32
    one = pair.submit(PROMPT, 20)
    while not pair.generation.trails[one].answers.get(0):
        pair.turn()
    # 30 + 2 tokens, and room for the next ones.
    assert credits(pair.generation) == 32 - 8 - 1
    pair.run()
    assert credits(pair.generation) == 32
    pair.check_idle()


def test_what_decodes_keeps_room_for_its_next_tokens_when_a_cache_comes():
    """Blocks that a peer writes can not be taken back: the last free one is for the answer that needs it next."""
    pair = Pair(num_blocks=16, prefix_caching=False)
    first = pair.submit(PROMPT[:16], 40)
    while not pair.generation.trails[first].answers.get(0):
        pair.turn()
    held = pair.generation.blocks.used
    free = 16 - held
    # Prompt and first token take all that is free; there would be nothing left for the other answer's next block.
    late = pair.submit([70 + at % 20 for at in range(4 * free - 1)], 2)
    before = len(pair.text(first))
    for _ in range(6):
        pair.turn()
    assert len(pair.generation.messages(ReceiveRequest)) == 1, "it waits"
    assert len(pair.text(first)) > before
    pair.run()
    assert pair.text(first) == oracle(PROMPT[:16], 40)
    assert pair.generation.trails[late].reason is FinishReason.LENGTH
    pair.check_idle()


def test_others_are_computed_while_a_cache_is_on_its_way():
    """The order of what happened: asked, steps of the other request, arrived."""
    pair = Pair(write=True, prefix_caching=False)
    running = pair.submit(PROMPT, 24)
    while not pair.generation.trails[running].answers.get(0):
        pair.turn()
    pair.write = False
    waiting = pair.submit(PROMPT[:12], 4)
    while len(pair.generation.messages(ReceiveRequest)) < 2:
        pair.turn()
    asked = len(pair.text(running))
    for _ in range(5):
        pair.turn()
    during = len(pair.text(running)) - asked
    assert during == 5, "one token a step, whatever is on its way"
    assert not pair.generation.trails[waiting].answers.get(0)
    pair.write = True
    pair.run()
    assert pair.text(running) == oracle(PROMPT, 24)
    assert pair.text(waiting) == oracle(PROMPT[:12], 4)
    pair.check_idle()


def test_an_answer_is_preempted_while_a_cache_is_on_its_way_and_the_cache_is_not_touched():
    pair = Pair(num_blocks=14, prefix_caching=False)
    texts = {pair.submit(PROMPT[:8], 24): PROMPT[:8], pair.submit(PROMPT[:9], 24): PROMPT[:9]}
    while not all(pair.generation.trails[key].answers.get(0) for key in texts):
        pair.turn()
    pair.write = False
    late = pair.submit(PROMPT[:12], 4)
    texts[late] = PROMPT[:12]
    while len(pair.generation.messages(ReceiveRequest)) < 3:
        pair.turn()
    exposed = pair.generation.exposed[late].tolist()
    for _ in range(24):
        pair.turn()
        assert pair.generation.exposed[late].tolist() == exposed
    old, young = (key for key in texts if key != late)
    assert len(pair.text(old)) == 24, "the oldest one goes on"
    assert len(pair.text(young)) < 24, "the younger one gave its blocks"
    pair.write = True
    pair.run()
    for key, prompt in texts.items():
        assert pair.text(key) == oracle(prompt, 4 if key == late else 24)
        assert isinstance(pair.generation.trails[key].end, RequestFinished)
    pair.check_idle()
