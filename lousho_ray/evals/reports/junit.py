"""JUnit XML: one `testsuite` an eval, one `testcase` a case."""

from __future__ import annotations

import re
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from lousho_ray.evals.records import CaseRecord
from lousho_ray.evals.summary import EvalSummary, Summary

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 has no way to write (https://www.w3.org/TR/xml/#charsets)."""


def junit_report(summary: Summary) -> str:
    """A failed gate is a `failure`, a case that raised an `error`, a soft failure a note (a failure when strict)."""
    root = Element("testsuites", name="lousho eval")
    for one in summary.evals:
        _suite(root, one, strict=summary.strict)
    for error in summary.load_errors:
        suite = SubElement(root, "testsuite", name=_clean(str(error["file"])), tests="1", failures="0", errors="1")
        case = SubElement(suite, "testcase", name="load", classname=_clean(str(error["file"])))
        SubElement(case, "error", message=_clean(str(error["message"])), type=_clean(str(error["name"])))
    indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + tostring(root, encoding="unicode") + "\n"


def _suite(root: Element, one: EvalSummary, *, strict: bool) -> None:
    below = not one.passed or one.threshold >= 1
    suite = SubElement(root, "testsuite", name=_clean(one.name), tests=str(len(one.records)))
    failures = 0
    for record in one.records:
        case = SubElement(suite, "testcase", name=_clean(_name(record)), classname=_clean(one.name), file=_clean(record.file))
        case.set("time", f"{record.duration_ms / 1000:.3f}")
        failed = [f"{item.name}: {item.message}" for item in record.failed_gates] if below else []
        noted = [f"{item.name}: {item.message}" for item in record.failed_softs]
        if not below:
            noted += [f"{item.name}: {item.message}" for item in record.failed_gates]
        if strict:
            failed, noted = failed + noted, []
        for line in failed:
            SubElement(case, "failure", message=_clean(line), type="gate").text = _clean(line)
        failures += bool(failed)
        if record.error is not None and record.status in ("error", "outage"):
            text = f"{record.error['message']}\n{record.error.get('traceback', '')}".strip()
            error = SubElement(case, "error", message=_clean(str(record.error["message"])), type=_clean(str(record.error["name"])))
            error.text = _clean(text)
        if noted:
            SubElement(case, "system-out").text = _clean("\n".join(noted))
    suite.set("failures", str(failures))
    suite.set("errors", str(one.errors + one.outages))
    suite.set("time", f"{sum(record.duration_ms for record in one.records) / 1000:.3f}")


def _name(record: CaseRecord) -> str:
    return record.case + (f" #{record.repeat + 1}" if record.repeat else "")


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("", text)
