"""The emulated engine: the real vLLM with real KV memory, and a clock in the place of the GPU's compute time.

See docs/emulator.md for what is real, what is not, and how an engine is started.
"""
