"""How a token is chosen: pure functions of the logits, the request's settings and its tokens.

This package's own modules `params` and `random` are torch-free; the functions on logits are in `sampling.sampler`.
"""

from isthmus_worker.sampling.params import check_sampling as check_sampling
from isthmus_worker.sampling.random import uniforms as uniforms
