"""The border of the worker: protobuf to frozen values and back.

`requests` and `responses` are the gRPC API: a client's mistakes raise `InvalidRequest` naming the field.
`engine_frames` is the hub's end of the socket to its engine process: both ends are one build, so a malformed frame is a
bug and raises `FrameError`.
"""
