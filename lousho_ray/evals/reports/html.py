"""One self-contained page: plots of scores, cost and latency, a filter, and each failing case with its transcript.

Nothing is loaded from elsewhere. All data stands in one JSON script block and is put on the page as text, never as HTML; a content
security policy lets no other script run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from typing import Any

from lousho_ray.evals.records import CaseRecord
from lousho_ray.evals.reports.table import eval_line, totals_line
from lousho_ray.evals.summary import Summary


def html_report(summary: Summary) -> str:
    """The page."""
    folder = files("lousho_ray.evals.reports")
    script = (folder / "page.js").read_text("utf-8")
    style = (folder / "page.css").read_text("utf-8")
    data = {
        "title": totals_line(summary),
        "halted": summary.halted,
        "evals": [{"name": one.name, "line": eval_line(one), "passed": one.passed} for one in summary.evals],
        "loadErrors": [{"file": error["file"], "text": f"{error['name']}: {error['message']}"} for error in summary.load_errors],
        "drift": [dict(row) for row in summary.drift],
        "cases": [_case(record) for record in summary.records],
    }
    # `<` is the only character that could end the block; as \\u003c it is the same JSON.
    block = json.dumps(data, ensure_ascii=True, default=str).replace("<", "\\u003c")
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src '{_digest(script)}'"
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Evals</title><style>{style}</style></head>\n"
        f'<body><main id="page"></main><script type="application/json" id="data">{block}</script>\n'
        f"<script>{script}</script></body></html>\n"
    )


def _case(record: CaseRecord) -> dict[str, Any]:
    clean = record.status == "passed" and not record.failed_softs
    return {
        "title": record.title,
        "eval": record.eval,
        "status": record.status,
        "tags": list(record.tags),
        "ms": record.duration_ms,
        "cost": record.cost_usd,
        "tokens": record.tokens,
        "steps": record.steps,
        "assertions": [item.to_dict() for item in record.assertions],
        "reply": record.reply,
        "error": None if record.error is None else dict(record.error),
        "transcript": [] if clean else [dict(message) for message in record.transcript],
    }


def _digest(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
