"""The router: one OpenAI-compatible endpoint over prefill and decode engines.

`server.add_arguments` and `server.run` are what the command line uses. The package needs neither vLLM nor
NIXL.
"""
