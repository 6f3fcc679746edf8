"""A stand-in for a server in tests of the command line; run as a program.

Answers every GET with `--status` and "ok", and misbehaves on request.
"""

from __future__ import annotations

import argparse
import http.server
import os
import signal
import subprocess
import sys
from pathlib import Path


class _Handler(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        """Answer, or end the process."""
        if self.path == "/die":
            print("asked to die", flush=True)
            os._exit(7)
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *arguments: object) -> None:
        """Stay silent: the log belongs to the test."""


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--status", type=int, default=200)
    parser.add_argument("--exit-code", type=int, help="end at once, saying why")
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--child", type=Path, help="start a child that ignores SIGTERM; its pid goes here")
    arguments = parser.parse_args()
    if arguments.exit_code is not None:
        print("the port of this stub is cursed", flush=True)
        sys.exit(arguments.exit_code)
    if arguments.ignore_sigterm:
        signal.signal(signal.SIGTERM, lambda *_: print("SIGTERM ignored", flush=True))
    if arguments.child:
        code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
        child = subprocess.Popen([sys.executable, "-c", code])
        arguments.child.write_text(str(child.pid))
    _Handler.status = arguments.status
    server = http.server.ThreadingHTTPServer(("127.0.0.1", arguments.port), _Handler)
    print(f"stub {os.getpid()} listens", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
