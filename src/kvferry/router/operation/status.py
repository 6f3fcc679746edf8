"""The state of a router in one piece, for programs and for people."""

from __future__ import annotations

from html import escape
from typing import Any

import kvferry
from kvferry.router import code_state
from kvferry.router.engines.pool import Pool, Role, Worker
from kvferry.router.ground.settings import RouterSettings
from kvferry.router.operation.admin import described
from kvferry.router.operation.advisories import advisories_for
from kvferry.router.serving.admission import Admission

Status = dict[str, Any]

_COLUMNS = ("worker", "role", "state", "legs", "model", "version", "engine")
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.3rem .6rem;"
    "border-bottom:1px solid #8884}li,.bad{color:#b00020}@media(prefers-color-scheme:dark)"
    "{body{background:#111;color:#ddd}li,.bad{color:#ff8a80}}"
)


def status_of(pool: Pool, admission: Admission, settings: RouterSettings, up_seconds: float) -> Status:
    """What `/status` tells."""
    workers = pool.workers()
    now = pool.clock()
    return {
        "version": kvferry.__version__,
        "code": code_state(),
        "up_seconds": round(up_seconds, 3),
        "ready": pool.ready and not admission.closed,
        "draining": admission.closed,
        "requests": {"serving": admission.serving, "waiting": admission.waiting},
        "transfer_mode": settings.transfer_mode,
        "workers": [described(worker, now) for worker in workers],
        "warnings": _warnings(pool, workers),
    }


def page_of(status: Status) -> str:
    """The status as a page for a browser."""
    ready = "ready" if status["ready"] else '<span class="bad">not ready</span>'
    requests = status["requests"]
    warnings = "".join(f"<li>{escape(warning)}</li>" for warning in status["warnings"])
    head = "".join(f"<th>{column}</th>" for column in _COLUMNS)
    rows = "".join(_row(worker) for worker in status["workers"])
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>kvferry router</title><style>{_STYLE}'
        f"</style><h1>kvferry router {escape(status['version'])}: {ready}</h1>"
        f"<p>{requests['serving']} requests served now, {requests['waiting']} waiting;"
        f" {escape(status['transfer_mode'])}; up {status['up_seconds']:.0f} s; {escape(status['code'])}."
        f"</p><ul>{warnings}</ul><table><tr>{head}</tr>{rows}</table></html>\n"
    )


def _row(worker: dict[str, Any]) -> str:
    state = "ready" if worker["ready"] else worker["problem"] or "draining"
    cells = (
        worker["name"],
        worker["role"],
        state,
        str(worker["in_flight"]),
        ", ".join(model["id"] for model in worker["models"]),
        worker["version"],
        worker.get("engine", {}).get("id", ""),
    )
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _warnings(pool: Pool, workers: list[Worker]) -> list[str]:
    """What somebody should look at."""
    told = [f"no {role.value} engine is ready" for role in Role if not pool.any_ready(role)]
    told += [f"{worker.name} is not ready: {worker.problem}" for worker in workers if worker.problem]
    for worker in workers:
        told += [
            f"{worker.name} runs vLLM {worker.version}, which has {advisory.name}: {advisory.what}; fixed in"
            f" {'.'.join(map(str, advisory.fixed))}"
            for advisory in advisories_for(worker.version)
        ]
    versions = sorted({worker.version for worker in workers if worker.version})
    if len(versions) > 1:
        told.append(f"the engines run different versions of vLLM: {', '.join(versions)}")
    return told
