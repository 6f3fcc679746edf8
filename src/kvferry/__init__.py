"""kvferry carries a request's KV cache from the engine that prefilled it to the engine that decodes it.

Importing this package loads nothing heavy: no vLLM, torch, NIXL or numpy.
"""

__version__ = "0.1.0"
