"""The router: one OpenAI-compatible endpoint over prefill and decode engines.

`server.add_arguments` and `server.run` are what the command line uses. The package needs neither vLLM nor
NIXL.
"""

from kvferry.compiled import install_once
from kvferry.compiled import state as code_state

__all__ = ["code_state"]

# Before any module of the router is imported: afterwards it would be too late for that module.
install_once()
