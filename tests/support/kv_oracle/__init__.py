"""An oracle of the hand-off geometry: plain loops over (layer, role, head, token, byte), no code of the planner.

    model.py       what a model caches, in global coordinates
    deployment.py  how one instance spreads it over ranks, blocks, pools and registered regions
    storage.py     the same as addresses: where a coordinate lies on a rank
    memory.py      memory of a rank as one code per byte; copies runs and refuses what an agent would refuse
    tables.py      the storage as the page tables and ranks that the planner reads
    request.py     one prompt: reuse on either side, chunks, block ids
    check.py       plans a case, runs it, compares every byte and every extent
    draw.py        draws cases, from a seed or from hypothesis

Every byte of memory is a 64-bit code that names its coordinate, so a wrong byte can not look right by chance.
"""
