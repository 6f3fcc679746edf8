"""The router: one OpenAI-compatible endpoint over prefill and decode engines.

`server.add_arguments` and `server.run` are what the command line uses. The package needs neither vLLM nor
NIXL.
"""

from kvferry import compiled

# Before any module of the router is imported: afterwards it would be too late for that module.
compiled.install_once()
