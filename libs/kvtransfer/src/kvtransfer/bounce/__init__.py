"""The bounced way: fragments gathered into chunks, every chunk written with one descriptor, scattered on arrival.

arena, credits   where chunks lie and who may send one (pure)
copying          gather and scatter: one copy of strided runs, on the host or on a CUDA device
"""
