"""Several router processes on the same public ports: a parent that serves nobody, and children that do.

The kernel gives each new connection to one of the processes that listen on a port with SO_REUSEPORT. So it is
connections that are spread, not requests: one HTTP/2 channel stays on one process for its whole life.
"""
