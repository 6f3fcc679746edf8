"""Serve one OpenAI-compatible endpoint over prefill and decode engines.

Needs neither vLLM nor NIXL on its host.
"""

from __future__ import annotations

import argparse

from kvferry.router import server


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The router's own arguments."""
    server.add_arguments(parser)


def run(namespace: argparse.Namespace) -> int:
    """Serve until interrupted."""
    return server.run(namespace)
