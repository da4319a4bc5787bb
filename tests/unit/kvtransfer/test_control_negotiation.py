"""What two hubs agree on: the smaller of both, or every reason at once."""

from __future__ import annotations

import dataclasses

import pytest

from kv_storage import Shape, Storage, instance, rank_info
from kvtransfer.control.liveness import SILENT_PROBES, Liveness, Probe
from kvtransfer.control.negotiation import (
    Dialect,
    Terms,
    answer_hello,
    check_welcome,
    make_hello,
    make_welcome,
    swapped,
)
from kvtransfer.messages import Capability, Hello, TransferLimits, Welcome
from kvtransfer.peer_plan import plan_digest
from kvtransfer.ports import Incompatibility
from kvtransfer.rank_info import InstanceInfo, InstanceRole

TABLE = Storage(Shape(), "slot_major", 4).page_table()
CONTEXT = instance(rank_info(TABLE), role=InstanceRole.CONTEXT, name="c")
GENERATION = instance(rank_info(TABLE))
SMALL, LARGE = TransferLimits(4, 1000), TransferLimits(8, 500)


def hello(dialect: Dialect | None = None, info: InstanceInfo = GENERATION, limits: TransferLimits = SMALL) -> Hello:
    return make_hello(info, limits, 1, dialect or Dialect())


def fields(verdict: object) -> set[str]:
    assert isinstance(verdict, tuple), verdict
    return {one.field for one in verdict}


def answer(said: Hello, dialect: Dialect | None = None) -> Terms | tuple[Incompatibility, ...]:
    return answer_hello(CONTEXT, LARGE, said, dialect or Dialect())


def welcome(said: Hello) -> Welcome:
    terms = answer(said)
    assert isinstance(terms, Terms)
    return make_welcome(CONTEXT, terms, plan_digest(CONTEXT, GENERATION), 1)


def test_both_sides_end_with_the_same_terms():
    mine = answer(hello())
    theirs = check_welcome(hello(), welcome(hello()))
    assert isinstance(mine, Terms)
    assert isinstance(theirs, Terms)
    assert mine.limits == theirs.limits == TransferLimits(4, 500)
    assert mine.capabilities == theirs.capabilities == frozenset(Capability)
    assert mine.protocol_version == theirs.protocol_version
    assert [plan.digest for plan in mine.plans] == [plan.digest for plan in theirs.plans]
    assert (mine.peer, theirs.peer) == (GENERATION, CONTEXT)
    assert "at most 4" in str(mine)


@pytest.mark.parametrize(
    ("mine", "yours", "spoken"),
    [((1, 3), (2, 5), 3), ((2, 5), (1, 3), 3), ((1, 1), (1, 2), 1), ((1, 2), (3, 4), None), ((3, 4), (1, 2), None)],
)
def test_highest_version_that_both_speak(mine: tuple[int, int], yours: tuple[int, int], spoken: int | None):
    said = hello(Dialect(min_protocol_version=yours[0], protocol_version=yours[1]))
    verdict = answer(said, Dialect(min_protocol_version=mine[0], protocol_version=mine[1]))
    if spoken is None:
        assert fields(verdict) == {"protocol_version"}
    else:
        assert isinstance(verdict, Terms)
        assert verdict.protocol_version == spoken


def test_capabilities_intersect():
    verdict = answer(hello(Dialect(capabilities=frozenset())))
    assert isinstance(verdict, Terms)
    assert verdict.capabilities == frozenset()


def test_features_must_be_known_to_both():
    known = Dialect(known_features=frozenset({"a"}), required_features=("a",))
    assert fields(answer(hello(Dialect(required_features=("b",))))) == {"required_features.b"}
    assert fields(answer(hello(), known)) == {"required_features.a"}
    assert isinstance(answer(hello(known), known), Terms)


def test_every_reason_comes_at_once():
    model = dataclasses.replace(GENERATION.model, weights_digest=b"x", kv_dtype="BF16")
    info = dataclasses.replace(GENERATION, model=model, role=InstanceRole.CONTEXT)
    dialect = Dialect(protocol_version=9, min_protocol_version=9, required_features=("b",))
    assert fields(answer(hello(dialect, info))) == {
        "protocol_version",
        "required_features.b",
        "model.weights_digest",
        "model.kv_dtype",
        "role",
    }


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"protocol_version": 7}, "protocol_version"),
        ({"limits": TransferLimits(99, 1)}, "limits"),
        ({"plan_digest": b"other"}, "plan_digest"),
        ({"instance": dataclasses.replace(CONTEXT, role=InstanceRole.GENERATION)}, "role"),
    ],
)
def test_answer_beyond_the_offer_is_refused(change: dict[str, object], field: str):
    assert field in fields(check_welcome(hello(), dataclasses.replace(welcome(hello()), **change)))


def test_capability_that_was_not_offered_is_refused():
    verdict = check_welcome(hello(Dialect(capabilities=frozenset())), welcome(hello()))
    assert fields(verdict) == {"capabilities"}


def test_reasons_are_told_from_the_readers_side():
    (reason,) = swapped((Incompatibility("f", "a", "b", "do"),))
    assert (reason.mine, reason.yours) == ("b", "a")


def test_silence_is_probed_then_suspected():
    liveness = Liveness(ping_s=1.0, now=0.0)
    assert liveness.tick(0.9) is Probe.NOTHING
    assert liveness.tick(1.0) is Probe.PING
    assert liveness.tick(1.5) is Probe.NOTHING
    liveness.heard(1.6)
    at = 2.6
    for _ in range(SILENT_PROBES):
        assert liveness.tick(at) is Probe.PING
        at += 1.0
    assert liveness.tick(at) is Probe.SUSPECT
