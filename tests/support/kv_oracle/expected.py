"""What lies in a source, and what must lie in a destination afterwards and who must have written it: nested loops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kv_oracle.deployment import head_interval
from kv_oracle.election import Election
from kv_oracle.memory import JUNK, NOTHING, TAIL, Memory
from kv_oracle.model import Part, State
from kv_oracle.storage import address, local_sections

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from kv_oracle.codes import Codes
    from kv_oracle.request import BlockList, Case
    from kv_oracle.tables import Instance

Lists = dict[int, "BlockList"]  # by group of the model


@dataclass
class Want:
    """Per byte of a destination: the code that must be there (NOTHING: nothing), the flat rank that must have written
    it, and whether the byte does not matter."""

    codes: NDArray[np.int64]
    writer: NDArray[np.int64]
    free: NDArray[np.bool_]


def source_memory(case: Case, codes: Codes, instance: Instance, rank: int, lists: Lists) -> Memory:
    """Memory of a source rank that holds its part of the prompt in the listed blocks."""
    memory = Memory(instance.storages[rank].regions, JUNK)
    for g, p, part in _parts(case, lists):
        if isinstance(part, Part):
            addresses, named = list[int](), list[int]()
            for _, token, layer, buffer, head, at in _atoms(case, instance, rank, lists[g], (g, p, part)):
                addresses.append(at)
                named.append(TAIL if token < 0 else codes.attention(part, (g, p, layer), token, buffer, head))
            memory.put(addresses, named, part.unit)
        else:
            for layer, row, section, unit, at in _units(case, instance, rank, lists[g], (g, p, part)):
                code = codes.recurrent(part, (g, p, layer), row, section, unit)
                memory.put([at], [code], part.sections[section].unit_bytes)
    return memory


def wanted(
    case: Case, codes: Codes, src: Instance, dst: Instance, rank: int, lists: Lists, memory: Memory, seed_compat: bool
) -> Want:
    """What must lie in the memory of a destination rank after all source ranks have written."""
    count = len(memory.codes)
    want = Want(np.full(count, NOTHING), np.full(count, -1), np.zeros(count, bool))
    elect = Election(case, src, dst, seed_compat)
    for g, p, part in _parts(case, lists):
        if isinstance(part, Part):
            must, may = list[tuple[int, int, int]](), list[int]()
            for local, token, layer, buffer, head, at in _atoms(case, dst, rank, lists[g], (g, p, part)):
                if case.needed_from(g) <= token:
                    code = codes.attention(part, (g, p, layer), token, buffer, head)
                    must.append((at, code, elect.of_head(g, part, layer, head, token)))
                elif _matters_not(case, g, lists[g], local, token):
                    may.append(at)
            _mark(want, memory, must, part.unit)
            want.free[memory.at(may, part.unit)] = True
        elif case.begin_dst[g] < case.prompt:
            for layer, row, section, unit, at in _units(case, dst, rank, lists[g], (g, p, part)):
                code = codes.recurrent(part, (g, p, layer), row, section, unit)
                writer = elect.of_unit(part, layer, section, unit)
                _mark(want, memory, [(at, code, writer)], part.sections[section].unit_bytes)
    return want


def _mark(want: Want, memory: Memory, must: list[tuple[int, int, int]], unit: int) -> None:
    if must:
        at = memory.at([a for a, _, _ in must], unit)
        want.codes[at] = np.array([code for _, code, _ in must])[:, None] + np.arange(unit)
        want.writer[at] = np.array([writer for _, _, writer in must])[:, None]


def _matters_not(case: Case, g: int, listed: BlockList, local: int, token: int) -> bool:
    """Bytes that a writer may fill with anything: behind the prompt in its last block, and before a sliding window in
    the window's first block. Not where tokens are sharded, and never the reused prefix."""
    size = case.dst.groups[g].tokens_per_block
    if any(side.groups[g].sharding is not None and side.cp > 1 for side in (case.src, case.dst)):
        return False
    needed = case.needed_from(g)
    if needed >= case.prompt:
        return False
    if token < 0:
        return local // size == (case.prompt - 1) // size
    return case.windowed(g) and listed.begin <= token and token // size == needed // size


def _parts(case: Case, lists: Lists) -> Iterator[tuple[int, int, Part | State]]:
    for g in lists:
        for p, part in enumerate(case.model.groups[g].parts):
            yield g, p, part


def _atoms(
    case: Case, instance: Instance, rank: int, listed: BlockList, which: tuple[int, int, Part]
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """(local token, global token or -1 behind the last, layer, buffer, global head, address) of all listed blocks."""
    deployment, place, storage = instance.deployment, instance.places[rank], instance.storages[rank]
    g, p, part = which
    size = deployment.groups[g].tokens_per_block
    begin, end = head_interval(deployment.heads, part.heads, deployment.tp, place.tp) if part.heads else (0, 1)
    for layer in deployment.local_layers(case.model, place.stage, g):
        for buffer in range(part.buffers):
            for at, slot in enumerate(listed.slots):
                if slot < 0:
                    continue
                for inside in range(size):
                    local = (listed.first + at) * size + inside
                    token = listed.tokens[local] if local < len(listed.tokens) else -1
                    for head in range(begin, end):
                        where = (slot, inside, head - begin, end - begin)
                        found = address(storage, case.model, deployment, (g, p, layer, buffer), where)
                        yield local, token, layer, buffer, head, found


def _units(
    case: Case, instance: Instance, rank: int, listed: BlockList, which: tuple[int, int, State]
) -> Iterator[tuple[int, int, int, int, int]]:
    """(layer, row, section, global unit, address) of the sequence's slot."""
    deployment, place, storage = instance.deployment, instance.places[rank], instance.storages[rank]
    g, p, state = which
    for layer in deployment.local_layers(case.model, place.stage, g):
        buffer = storage.buffers[g, p, layer, 0]
        at = buffer.start + listed.slots[0] * buffer.stride
        for row in range(state.rows):
            for section, (described, begin, end) in enumerate(
                local_sections(state, deployment.heads, deployment.tp, place.tp)
            ):
                for unit in range(begin, end):
                    yield layer, row, section, unit, at
                    at += described.unit_bytes
