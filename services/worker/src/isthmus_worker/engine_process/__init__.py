"""The engine's process: model runner, scheduler, loop and transfer agent, a child of the hub.

    python -m isthmus_worker.engine_process --config FILE --scheduler-fd N [--rank-fd M] [--lock-fd K]

The file descriptors are inherited from the hub, which also reports its exit.
"""
