"""Direct or bounced: what the model says for shapes with a clear answer, what the gates say, and what is remembered."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from kv_storage import Shape as StorageShape
from kv_storage import Storage, instance, rank_info
from kvtransfer.cost.book import DEVICE, HOST, Copying, CostBook, Staged
from kvtransfer.cost.model import Shape, best_bounced, bounced, direct_s, gather_s
from kvtransfer.cost.policies import ChunkLimits, StagingPolicy, decide
from kvtransfer.dry_run import dry_run
from kvtransfer.pools import MemoryKind, RegisteredRegion
from kvtransfer.probe_ports import PairProbe
from kvtransfer.rank_info import InstanceRole
from kvtransfer.transceiver.parts import tapered_parts

MIB = 1 << 20
LIMITS = ChunkLimits(MIB, 128 * MIB)
SMALL = Shape(256 * MIB, 16384, 16384, 256)
LARGE = Shape(256 * MIB, 8, 8, 256)


@pytest.mark.parametrize("cost", [HOST, DEVICE])
def test_many_small_runs_bounce_and_few_large_ones_do_not(cost):
    many = replace(SMALL, descriptors=1 << 19, fragments=1 << 19)
    assert decide(StagingPolicy.COST, cost, many, LIMITS).bounce
    assert not decide(StagingPolicy.COST, cost, LARGE, LIMITS).bounce


def test_the_break_even_grows_with_bytes():
    """More bytes pay for two more passes: more descriptors are needed before these pay."""

    def least(nbytes: int) -> int:
        shapes = (Shape(nbytes, count, count, 1) for count in range(1, 4000))
        return next(one.descriptors for one in shapes if decide(StagingPolicy.COST, DEVICE, one, LIMITS).bounce)

    assert least(64 * MIB) < least(1024 * MIB)


def test_the_chosen_chunk_is_the_best_of_all_sizes():
    best = best_bounced(DEVICE, SMALL, LIMITS)
    sizes = [MIB << k for k in range(8)]
    assert best.total_s == min(bounced(DEVICE, SMALL, size).total_s for size in sizes)
    assert best.chunk_bytes in sizes
    assert best.writer_s < best.total_s


def test_a_sender_that_copies_and_writes_in_turn_is_slower():
    near = replace(DEVICE, credit_s=1e-5)
    turns = replace(near, overlaps=False)
    assert bounced(turns, SMALL, 16 * MIB).total_s > bounced(near, SMALL, 16 * MIB).total_s


def test_more_chunks_are_under_way_where_an_answer_takes_longer():
    far, near = replace(DEVICE, credit_s=2e-3), replace(DEVICE, credit_s=1e-5)
    ways = [bounced(cost, SMALL, 16 * MIB, 64) for cost in (near, far)]
    assert 2 <= ways[0].depth < ways[1].depth < 64
    assert bounced(far, SMALL, 16 * MIB, 2).total_s > ways[1].total_s
    assert bounced(near, SMALL, 128 * MIB, 64).depth == 2


@pytest.mark.parametrize(
    ("nbytes", "chunk", "sizes"),
    [(1, 8, [1]), (32, 8, [8] * 4), (33, 8, [2, 8, 8, 8, 5, 2]), (21, 5, [1, 5, 5, 5, 4, 1])],
)
def test_the_first_and_the_last_of_many_chunks_are_small(nbytes: int, chunk: int, sizes: list[int]):
    parts = tapered_parts(nbytes, chunk)
    assert [one.end - one.begin for one in parts] == sizes
    assert all(a.end == b.begin for a, b in itertools.pairwise(parts))
    assert (parts[0].begin, parts[-1].end) == (0, nbytes)
    assert len(parts) == bounced(HOST, Shape(nbytes, 1, 1, 1), chunk).chunks


@pytest.mark.parametrize(
    ("policy", "shape", "bounce"),
    [
        (StagingPolicy.BLOCKS_96, replace(LARGE, blocks=96), True),
        (StagingPolicy.BLOCKS_96, replace(SMALL, blocks=95), False),
        (StagingPolicy.BYTES_2MIB, Shape(2 * MIB, 1, 1, 1), True),
        (StagingPolicy.BYTES_2MIB, Shape(2 * MIB - 1, 10**6, 10**6, 1), False),
        (StagingPolicy.SMALL_DESCRIPTORS, Shape(16 * MIB, 1024, 1024, 1), True),
        (StagingPolicy.SMALL_DESCRIPTORS, Shape(16 * MIB, 1023, 1023, 1), False),
        (StagingPolicy.SMALL_DESCRIPTORS, Shape(17 * MIB, 1024, 1024, 1), False),
        (StagingPolicy.ALWAYS, Shape(1, 1, 1, 1), True),
        (StagingPolicy.ALWAYS, Shape(0, 0, 0, 0), False),
        (StagingPolicy.NEVER, replace(SMALL, descriptors=10**7), False),
    ],
)
def test_the_fixed_gates(policy, shape, bounce):
    decision = decide(policy, DEVICE, shape, LIMITS)
    assert decision.bounce is bounce
    assert decision.why


def test_a_probe_sets_the_costs_of_its_path_and_they_survive_a_restart(tmp_path):
    file = tmp_path / "kept" / "costs.json"
    book = CostBook(HOST, file)
    book.copying(Copying(8e9, 7e9, 2e-8))
    book.probed(PairProbe(0, 0, "fabric", 8 * MIB, 1e-3, 1e-5, 1e-5 + 8 * MIB / 4e9, 3e-6))
    cost = book.cost("fabric")
    assert cost.rate == pytest.approx(4e9)
    assert (cost.post_s, cost.gather_rate) == (3e-6, 8e9)
    assert book.knows("fabric")
    assert CostBook(HOST, file).cost("fabric") == cost
    assert not CostBook(HOST, file).knows("other")


@pytest.mark.parametrize("text", ["", "{", '{"version": 99, "paths": {}}', '{"version": 1, "paths": {"a": {"x": 1}}}'])
def test_a_file_that_can_not_be_used_is_measured_anew(tmp_path, text):
    file = tmp_path / "costs.json"
    file.write_text(text)
    assert CostBook(HOST, file).cost("a") == HOST


def test_observed_transfers_correct_the_predictions():
    book, shape = CostBook(DEVICE), Shape(4 * MIB, 4096, 4096, 1)
    for _ in range(60):
        book.wrote("p", shape, 3 * direct_s(DEVICE, shape))
    assert direct_s(book.cost("p"), shape) == pytest.approx(3 * direct_s(DEVICE, shape), rel=0.1)
    assert book.cost("q") == DEVICE


def test_a_failed_probe_changes_nothing():
    book = CostBook(HOST)
    book.probed(PairProbe(0, 0, problem="no scratch"))
    assert book.cost("p") == HOST


def test_what_a_write_says_is_shared_between_bytes_and_descriptors():
    book = CostBook(HOST)
    for _ in range(60):
        book.wrote("p", Shape(512 * MIB, 4, 4, 1), 2 * direct_s(HOST, Shape(512 * MIB, 4, 4, 1)))
    assert book.cost("p").rate == pytest.approx(HOST.rate / 2, rel=0.05)
    assert book.cost("p").post_s == pytest.approx(HOST.post_s, rel=0.05)


def test_stages_of_chunks_correct_what_they_are_about():
    book, shape = CostBook(HOST), Shape(64 * MIB, 30000, 30000, 1)
    real = replace(HOST, gather_rate=HOST.gather_rate / 6, fragment_s=HOST.fragment_s * 6, credit_s=3e-3, chunk_s=2e-3)
    for size in (MIB, 4 * MIB, 16 * MIB) * 20:
        way = bounced(real, shape, size)
        seen = Staged(way.writer_s, gather_s(real, shape.nbytes, shape.fragments), 3e-3, size, way.chunks)
        book.staged("p", shape, seen)
    found = book.cost("p")
    assert found.gather_rate == pytest.approx(real.gather_rate, rel=0.05)
    assert found.scatter_rate == pytest.approx(HOST.scatter_rate / 6, rel=0.05)
    assert (found.credit_s, found.chunk_s) == (pytest.approx(3e-3), pytest.approx(2e-3, rel=0.1))
    assert (found.rate, found.post_s) == (HOST.rate, HOST.post_s)


def test_the_first_transfer_in_chunks_counts_fully():
    book, shape = CostBook(HOST), Shape(64 * MIB, 30000, 30000, 1)
    book.staged("p", shape, Staged(1.0, 8 * gather_s(HOST, shape.nbytes, shape.fragments), 5e-3, MIB, 64))
    assert book.cost("p").gather_rate == pytest.approx(HOST.gather_rate / 8)
    assert book.cost("p").credit_s == pytest.approx(5e-3)


def test_what_transfers_have_taught_survives_a_restart_and_a_probe(tmp_path):
    file, shape = tmp_path / "costs.json", Shape(64 * MIB, 30000, 30000, 1)
    book = CostBook(HOST, file)
    probe = PairProbe(0, 0, "p", 8 * MIB, 1e-3, 1e-5, 1e-5 + 8 * MIB / 4e9, 3e-6)
    book.probed(probe)
    for _ in range(4):
        book.staged("p", shape, Staged(1.0, 8 * gather_s(HOST, shape.nbytes, shape.fragments), 5e-3, MIB, 64))
    again = CostBook(HOST, file)
    again.copying(Copying(99e9, 99e9, 1e-9))
    assert again.cost("p") == book.cost("p")
    assert again.cost("p").credit_s == pytest.approx(5e-3)
    learnt = book.cost("p")
    book.probed(replace(probe, per_run=6e-6))
    assert book.cost("p") == replace(learnt, post_s=6e-6)


def test_the_first_direct_write_counts_by_half():
    book, shape = CostBook(HOST), Shape(MIB, 4096, 4096, 1)
    book.wrote("p", shape, 2 * direct_s(HOST, shape))
    assert direct_s(book.cost("p"), shape) == pytest.approx(2**0.5 * direct_s(HOST, shape), rel=0.1)


def test_a_write_that_lost_its_processor_is_not_believed():
    book, shape = CostBook(HOST), Shape(MIB, 16, 16, 1)
    book.wrote("p", shape, 100 * direct_s(HOST, shape))
    assert direct_s(book.cost("p"), shape) < 2 * direct_s(HOST, shape)


def test_small_writes_say_little_about_large_ones():
    """A write costs more than the probe has shown, whatever its size."""
    book, small, large = CostBook(HOST), Shape(64 << 10, 8, 8, 1), Shape(32 * MIB, 4096, 4096, 1)
    real = replace(HOST, write_s=4 * HOST.write_s)
    for _ in range(100):
        book.wrote("p", small, direct_s(real, small))
    assert direct_s(book.cost("p"), small) == pytest.approx(direct_s(real, small), rel=0.05)
    assert direct_s(book.cost("p"), large) == pytest.approx(direct_s(real, large), rel=0.35)


def test_a_dry_run_says_which_way_a_measured_pair_would_take():
    small = Storage(StorageShape(heads=2, unit=256), "slot_major", 64)
    context = instance(rank_info(small.page_table()), role=InstanceRole.CONTEXT, name="c")
    info = rank_info(Storage(StorageShape(heads=2, unit=256, tokens_per_block=16), "layer_major", 64).page_table())
    arena = RegisteredRegion(1 << 50, 64 * MIB, MemoryKind.DRAM)
    generation = instance(replace(info, arena=arena))
    slow_runs = PairProbe(0, 0, "cma", 8 * MIB, 1e-3, 1e-5, 4e-3, 1e-2)
    plan = dry_run(context, generation, 200, lambda src, dst: slow_runs)
    assert "rank 0 -> rank 0: in chunks of 1 MiB" in plan.explanation
    fast_runs = replace(slow_runs, per_run=1e-9)
    plan = dry_run(context, generation, 200, lambda src, dst: fast_runs)
    assert "rank 0 -> rank 0: directly" in plan.explanation
    assert "rank 0 -> rank 0: directly" not in dry_run(context, generation, 200, lambda src, dst: None).explanation


@pytest.mark.parametrize("with_arena", [True, False])
def test_a_dry_run_says_that_caches_lie_in_different_kinds_of_memory(with_arena: bool):
    tables = [Storage(StorageShape(), "slot_major", 64, kind=kind).page_table() for kind in MemoryKind][:2]
    context = instance(rank_info(tables[0]), role=InstanceRole.CONTEXT, name="c")
    arena = RegisteredRegion(1 << 50, 64 * MIB, MemoryKind.DRAM) if with_arena else None
    generation = instance(replace(rank_info(tables[1]), host_arena=arena))
    probe = PairProbe(0, 0, "cma", 8 * MIB, 1e-3, 1e-5, 4e-3, 1e-9)
    text = dry_run(context, generation, 200, lambda src, dst: probe).explanation
    way = "through host memory on both sides" if with_arena else "directly, hundreds of times slower"
    assert f"rank 0 -> rank 0: from a cache in DRAM to one in VRAM: {way}" in text
    assert ("in chunks of" in text) == with_arena
