"""A hub and an engine that starts its own processes: each process connects to the hub's UNIX socket by itself.

    hub ── LocalServer ◀── UNIX socket ──┬── scheduler process: SchedulerLink
                                         └── rank processes: connect_rank, then AgentThread

The hub learns the process id of every connection from the kernel and watches the process by pidfd: its exit report is
the proof that it writes no more, as if the hub had been its parent.
"""
