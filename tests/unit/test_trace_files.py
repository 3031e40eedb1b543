"""Trace files: what is written when, and what `list_traces` and `read_trace` make of it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from lousho_ray import ConfigurationError, MockProvider, create_agent, semconv, tool, traces
from lousho_ray.spans import Span, SpanStatus, TraceExporter, with_span
from lousho_ray.trace_files import file_trace_exporter
from lousho_ray.traces import _files, list_traces, read_trace

NOON = datetime(2026, 3, 5, 12).astimezone().timestamp() * 1000
DAY_MS = 86_400_000.0


@tool
def add(a: int = 1, b: int = 2) -> int:
    """Adds."""
    return a + b


def span_of(name: str, span_id: str, parent: str | None = None, *, trace_id: str = "t1", at: float = NOON, **about: Any) -> Span:
    return Span(span_id, name, "internal", trace_id, at, parent, dict(about))


def end(exporter: TraceExporter, span: Span, after_ms: float = 500, status: SpanStatus | None = SpanStatus("ok")) -> None:  # noqa: B008
    span.end_time, span.status = span.start_time + after_ms, status
    exporter.on_span_end(span)


def write(folder: Path, trace_id: str, at: float = NOON, **about: Any) -> None:
    """A trace of one span."""
    exporter = file_trace_exporter(folder)
    span = span_of("job", trace_id, trace_id=trace_id, at=at, **about)
    exporter.on_span_start(span)
    end(exporter, span)
    os.utime(next(folder.rglob(f"{trace_id}.jsonl")), (at / 1000, at / 1000))


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.rglob("*.jsonl")) for line in path.read_text("utf-8").splitlines()]


# ----------------------------------------------------------------------------------------------------------------- writing


async def test_a_run_is_a_file_of_its_day_with_a_line_for_each_span(tmp_path: Path) -> None:
    # OBS-32
    agent = create_agent(
        provider=MockProvider(), tools=[add], exporter=file_trace_exporter(tmp_path), runtime="local", name="clerk"
    )
    await agent.send("What does add say?")
    (file,) = tmp_path.rglob("*.jsonl")
    lines = lines_of(tmp_path)
    root = lines[-1]
    assert (
        file
        == tmp_path / datetime.fromtimestamp(root["startTime"] / 1000).astimezone().strftime("%Y-%m-%d") / f"{root['id']}.jsonl"
    )
    assert [line["name"].split()[0] for line in lines] == ["chat", "execute_tool", "chat", "invoke_agent"]
    assert {line["traceId"] for line in lines} == {root["id"]}
    assert {line["v"] for line in lines} == {1}
    assert "parentId" not in root
    assert {line["parentId"] for line in lines[:-1]} == {root["id"]}
    assert list(root) == ["v", "traceId", "id", "name", "kind", "startTime", "endTime", "attributes", "status"]
    assert root["status"] == {"code": "ok"}
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_line_is_written_as_its_span_ends_with_one_append(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # OBS-32, OBS-33: a span that has not ended is not in the file
    writes: list[bytes] = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: writes.append(data) or write(descriptor, data))
    exporter = file_trace_exporter(tmp_path)
    root, child = span_of("root", "t1"), span_of("child", "c", "t1")
    exporter.on_span_start(root)
    exporter.on_span_start(child)
    assert list(tmp_path.rglob("*.jsonl")) == []
    end(exporter, child)
    assert [line["name"] for line in lines_of(tmp_path)] == ["child"]
    end(exporter, root)
    assert [json.loads(line)["name"] for line in writes] == ["child", "root"]
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in writes)


def test_spans_after_midnight_are_in_the_file_of_the_day_the_trace_began(tmp_path: Path) -> None:
    # OBS-33
    exporter = file_trace_exporter(tmp_path)
    root, tomorrow = span_of("root", "t1"), span_of("tomorrow", "c", "t1", at=NOON + DAY_MS)
    exporter.on_span_start(root)
    exporter.on_span_start(tomorrow)
    end(exporter, tomorrow)
    end(exporter, root)
    late = span_of("late", "d", "c", at=NOON + 2 * DAY_MS)  # when nothing of the trace is open any more
    exporter.on_span_start(late)
    end(exporter, late)
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.jsonl")] == ["2026-03-05/t1.jsonl"]
    assert [line["name"] for line in lines_of(tmp_path)] == ["tomorrow", "root", "late"]


def test_a_span_that_never_began_or_has_ended_has_no_further_line(tmp_path: Path) -> None:
    # OBS-32
    exporter = file_trace_exporter(tmp_path)
    root, child = span_of("root", "t1"), span_of("child", "c", "t1")
    exporter.on_span_start(root)
    exporter.on_span_start(child)
    for span in (child, child, span_of("never begun", "d", "t1"), root, root):
        end(exporter, span)
    assert [line["name"] for line in lines_of(tmp_path)] == ["child", "root"]


def test_traces_side_by_side_do_not_mix(tmp_path: Path) -> None:
    exporter = file_trace_exporter(tmp_path)

    def run(number: int) -> None:
        for _ in range(20):
            with_span(exporter, f"job {number}", {"n": number}, lambda span: with_span(exporter, "part", {}, lambda _: 1, span.id))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = list_traces(tmp_path, limit=100)
    assert len(found) == 80
    assert all([span.name for span in read_trace(each.trace_id, tmp_path).spans][1] == "part" for each in found)


def test_any_value_and_any_text_can_be_written_and_read(tmp_path: Path) -> None:
    about = {"text": "Zeile 1\nZeile 2 ü \u2028 \ud83d", "list": [1, "a", None], "map": {"x": 1.5}, "thing": Path("/x")}
    write(tmp_path, "t1", **about)
    assert read_trace("t1", tmp_path).spans[0].attributes == {**about, "thing": "/x"}


def test_an_id_that_the_caller_made_up_leads_to_no_other_folder(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    with_span(file_trace_exporter(folder), "job", {}, lambda span: None, parent_id="../../up/x")
    assert [path.parent.parent for path in tmp_path.rglob("*.jsonl")] == [folder]
    assert read_trace("../../up/x", folder).trace_id == "../../up/x"


def test_a_folder_that_cannot_be_read_is_one_warning_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # OBS-33: a late span looks for the file of its trace
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError("not yours")

    monkeypatch.setattr(Path, "iterdir", refuse)
    monkeypatch.setattr(os, "open", refuse)
    exporter = file_trace_exporter(tmp_path)
    for _ in range(2):
        with_span(exporter, "late", {}, lambda span: None, parent_id="t1")
    monkeypatch.undo()
    assert [record.getMessage().endswith("not said again.") for record in caplog.records] == [True]


async def test_a_folder_that_cannot_be_written_is_one_warning_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # OBS-33
    (tmp_path / "file").write_text("in the way")
    agent = create_agent(provider=MockProvider(), tools=[add], exporter=file_trace_exporter(tmp_path / "file"), runtime="local")
    with caplog.at_level(logging.WARNING, "lousho_ray"):
        for _ in range(2):
            assert (await agent.send("What does add say?")).finish_reason == "stop"
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert str(tmp_path / "file") in warnings[0]


def test_a_line_that_does_not_fit_on_the_disk_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # OBS-33
    exporter = file_trace_exporter(tmp_path)
    root, child = span_of("root", "t1"), span_of("child", "c", "t1")
    exporter.on_span_start(root)
    exporter.on_span_start(child)
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:10]))
        end(exporter, child)
    end(exporter, root)
    assert [line["name"] for line in lines_of(tmp_path)] == ["root"]
    assert "10 of" in caplog.text


EXITS = """
import asyncio, sys
from lousho_ray import MockProvider, create_agent
from lousho_ray.spans import with_span
from lousho_ray.trace_files import file_trace_exporter
exporter = file_trace_exporter(sys.argv[1])
async def forever(span):
    await with_span(exporter, "inner", {}, hang, span.id)
async def hang(span):
    await asyncio.Event().wait()
loop = asyncio.new_event_loop()
task = loop.create_task(with_span(exporter, "outer", {"gen_ai.agent.name": "clerk"}, forever))
loop.run_until_complete(asyncio.sleep(0))
loop.run_until_complete(asyncio.sleep(0))
{how}
"""


@pytest.mark.parametrize(("how", "names"), [("", ["inner", "outer"]), ("import os; os._exit(0)", [])])
def test_spans_that_are_open_at_the_exit_of_the_process_are_ended_as_errors(tmp_path: Path, how: str, names: list[str]) -> None:
    # OBS-D5; OBS-33: of a process that is killed they are not in the file
    code = EXITS.replace("{how}", how)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert [line["name"] for line in lines_of(tmp_path)] == names
    if names:
        (found,) = list_traces(tmp_path)
        assert (found.agent, found.status) == ("clerk", "error")
        assert all("process ended" in line["status"]["message"] for line in lines_of(tmp_path))


@pytest.mark.parametrize("dir", ["", None, 3])
def test_the_folder_is_checked(dir: Any) -> None:
    for call in (lambda: file_trace_exporter(dir), lambda: list_traces(dir), lambda: read_trace("x", dir)):
        with pytest.raises(ConfigurationError, match="dir="):
            call()


async def test_files_hold_no_content_by_default(tmp_path: Path) -> None:
    # OBS-36
    agent = create_agent(provider=MockProvider(responses=["xyzzy-reply"]), exporter=file_trace_exporter(tmp_path), runtime="local")
    await agent.send("xyzzy-prompt")
    (file,) = tmp_path.rglob("*.jsonl")
    assert "xyzzy" not in file.read_text("utf-8")


# ----------------------------------------------------------------------------------------------------------------- listing


async def test_a_summary_says_what_a_run_did(tmp_path: Path) -> None:
    # OBS-34
    agent = create_agent(
        provider=MockProvider(), tools=[add], exporter=file_trace_exporter(tmp_path), runtime="local", name="clerk"
    )
    result = await agent.send("What does add say?")
    (found,) = list_traces(tmp_path)
    root = read_trace(found.trace_id, tmp_path).root
    assert root is not None
    assert root.end_time is not None
    assert (found.agent, found.model_calls, found.tool_calls, found.status) == ("clerk", 2, 1, "ok")
    assert (found.input_tokens, found.output_tokens) == (result.usage.input_tokens, result.usage.output_tokens)
    assert found.cost_usd == result.usage.cost_usd
    assert (found.started_at, found.duration_ms) == (root.start_time, root.end_time - root.start_time)


def test_a_summary_prints_as_a_line(tmp_path: Path) -> None:
    about = {semconv.AGENT_NAME: "clerk", semconv.OPERATION_NAME: "chat", semconv.INPUT_TOKENS: 1200, semconv.OUTPUT_TOKENS: 34}
    write(tmp_path, "t1", **about, **{semconv.COST_USD: 0.5})
    (found,) = list_traces(tmp_path)
    assert str(found) == "t1  2026-03-05 12:00:00  clerk  500 ms  1 model call  0 tool calls  1,200 in / 34 out  $0.5000  ok"
    write(tmp_path, "t0")
    assert str(list_traces(tmp_path)[1]).endswith("job  500 ms  0 model calls  0 tool calls  0 in / 0 out  ok")


def test_a_trace_that_is_removed_meanwhile_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "t1")
    write(tmp_path, "t2")
    found = _files(tmp_path)
    monkeypatch.setattr(traces, "_files", lambda _: found)
    (tmp_path / "2026-03-05" / "t1.jsonl").unlink()
    assert [summary.trace_id for summary in list_traces(tmp_path)] == ["t2"]


def test_the_newest_come_first_up_to_the_limit(tmp_path: Path) -> None:
    # OBS-34
    for number in range(6):
        write(tmp_path, f"trace{number}", NOON + number * DAY_MS / 2)
    assert [found.trace_id for found in list_traces(tmp_path)] == [f"trace{number}" for number in (5, 4, 3, 2, 1, 0)]
    assert [found.trace_id for found in list_traces(tmp_path, limit=2)] == ["trace5", "trace4"]


def test_a_trace_that_went_on_for_long_stands_where_it_began(tmp_path: Path) -> None:
    # OBS-34: its file is the one written last
    for number in range(3):
        write(tmp_path, f"trace{number}", NOON + number * DAY_MS / 4)
    later = (NOON + DAY_MS) / 1000
    os.utime(tmp_path / "2026-03-05" / "trace0.jsonl", (later, later))
    assert [found.trace_id for found in list_traces(tmp_path, limit=2)] == ["trace2", "trace1"]


def test_of_many_only_the_newest_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(50):
        write(tmp_path, f"trace{number}", NOON + number * 60_000)
    read: list[str] = []
    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda path, *args, **options: read.append(path.stem) or opened(path, *args, **options))
    assert len(list_traces(tmp_path, limit=5)) == 5
    assert len(read) <= 6


def test_a_folder_that_does_not_exist_has_no_traces(tmp_path: Path) -> None:
    # OBS-34
    assert list_traces(tmp_path / "none") == []
    (tmp_path / "2026-03-05").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "x.jsonl").write_text("{}")
    assert list_traces(tmp_path) == []


def test_without_a_root_a_trace_is_incomplete(tmp_path: Path) -> None:
    # OBS-34
    exporter = file_trace_exporter(tmp_path)
    for span in (root := span_of("root", "t1"), child := span_of("execute_tool x", "c", "t1", **{semconv.AGENT_NAME: "clerk"})):
        exporter.on_span_start(span)
    end(exporter, child)
    (found,) = list_traces(tmp_path)
    assert (found.trace_id, found.agent, found.status, found.duration_ms, found.cost_usd) == (
        "t1",
        "clerk",
        "incomplete",
        500,
        None,
    )
    end(exporter, root)
    assert list_traces(tmp_path)[0].status == "ok"


@pytest.mark.parametrize("status", [SpanStatus("error", "no"), None])
def test_how_the_root_ended_is_the_status(tmp_path: Path, status: SpanStatus | None) -> None:
    exporter = file_trace_exporter(tmp_path)
    root = span_of("root", "t1")
    exporter.on_span_start(root)
    end(exporter, root, status=status)
    assert list_traces(tmp_path)[0].status == ("error" if status else "aborted")
    assert read_trace("t1", tmp_path).spans[0].status == status


@pytest.mark.parametrize(
    "rest", [b'{"v":1,"traceId":"t1","id":"x"', b'{"v":1,"traceId":"t1"}\n', b"[]\n", b"\xff\xfe\n", b"7\n", b"\n"]
)
def test_a_broken_last_line_is_skipped(tmp_path: Path, rest: bytes) -> None:
    # OBS-34
    write(tmp_path, "t1")
    file = tmp_path / "2026-03-05" / "t1.jsonl"
    file.write_bytes(file.read_bytes() + rest)
    assert [found.status for found in list_traces(tmp_path)] == ["ok"]
    assert len(read_trace("t1", tmp_path).spans) == 1


def test_a_file_without_a_complete_line_is_no_trace(tmp_path: Path) -> None:
    write(tmp_path, "t1")
    (tmp_path / "2026-03-05" / "t1.jsonl").write_text('{"v":1')
    assert list_traces(tmp_path) == []
    with pytest.raises(ConfigurationError, match="no complete line"):
        read_trace("t1", tmp_path)


def test_the_limit_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="limit"):
        list_traces(tmp_path, limit=0)


# ----------------------------------------------------------------------------------------------------------------- reading


def test_the_beginning_of_an_id_is_enough_when_no_other_has_it(tmp_path: Path) -> None:
    # OBS-35
    for trace_id in ("abc1", "abc2", "abd", "ab"):
        write(tmp_path, trace_id)
    assert read_trace("abd", tmp_path).trace_id == "abd"
    assert read_trace("abc2", tmp_path).trace_id == "abc2"
    assert read_trace("ab", tmp_path).trace_id == "ab"  # a whole id that others begin with, too
    with pytest.raises(ConfigurationError, match="abc1, abc2") as caught:
        read_trace("abc", tmp_path)
    assert (caught.value.code, caught.value.field) == ("LOUSHO_CONFIG_INVALID", "id_or_prefix")


@pytest.mark.parametrize("unknown", ["x", "*", "[a]"])
def test_an_unknown_id_is_an_error(tmp_path: Path, unknown: str) -> None:
    # OBS-35
    write(tmp_path, "abc")
    with pytest.raises(ConfigurationError, match=r"no trace .* list_traces") as caught:
        read_trace(unknown, tmp_path)
    assert caught.value.code == "LOUSHO_CONFIG_INVALID"


def test_what_a_newer_version_wrote_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # OBS-35
    write(tmp_path, "t1")
    write(tmp_path, "t2")
    file = tmp_path / "2026-03-05" / "t1.jsonl"
    file.write_text(file.read_text().replace('"v":1', '"v":2'))
    with pytest.raises(ConfigurationError, match=r"format 2.*Upgrade"):
        read_trace("t1", tmp_path)
    assert [found.trace_id for found in list_traces(tmp_path)] == ["t2"]
    assert "upgrade" in caplog.text


def test_what_several_processes_wrote_of_one_trace_is_read_together(tmp_path: Path) -> None:
    # OBS-40: each has an exporter of its own, and they share a folder
    lead, worker = file_trace_exporter(tmp_path), file_trace_exporter(tmp_path)
    root, far = span_of("root", "t1"), span_of("far", "c", "t1", at=NOON + DAY_MS)
    lead.on_span_start(root)
    worker.on_span_start(far)
    end(worker, far)
    end(lead, root)
    trace = read_trace("t1", tmp_path)
    assert [span.name for span in trace.spans] == ["root", "far"]
    assert [span.name for span in trace.children(trace.root)] == ["far"]


def test_a_trace_prints_as_a_tree(tmp_path: Path) -> None:
    exporter = file_trace_exporter(tmp_path)
    chat = {semconv.OPERATION_NAME: "chat", semconv.INPUT_TOKENS: 1200, semconv.OUTPUT_TOKENS: 34}
    spans = [
        span_of("invoke_agent lead", "t1", **{semconv.AGENT_NAME: "lead", semconv.COST_USD: 0.5, semconv.FINISH_REASON: "stop"}),
        span_of("chat m", "a", "t1", at=NOON + 1, **chat, **{semconv.COST_USD: 0.25, semconv.RETRY_COUNT: 2}),
        span_of("execute_tool task", "b", "t1", at=NOON + 2),
        span_of("invoke_agent sub", "c", "b", at=NOON + 3),
        span_of("chat m", "d", "c", at=NOON + 4, **chat, **{semconv.USAGE_ESTIMATED: True, semconv.RATE_LIMIT_WAIT_MS: 1_500}),
        span_of("execute_tool x", "e", "t1", at=NOON + 5, **{semconv.ERROR_TYPE: "ValueError"}),
    ]
    for span in spans:
        exporter.on_span_start(span)
    end(exporter, spans[5], 61_000, SpanStatus("error", "no\n\x1b[31mluck " + "y" * 200))
    for span in reversed(spans[:5]):
        end(exporter, span, 2_000 if span.id == "t1" else 500)
    trace = read_trace("t1", tmp_path)
    head, *tree = str(trace).splitlines()
    assert head.startswith("trace t1  2026-03-05 12:00:00  ok")
    assert tree == [
        "invoke_agent lead          2.00 s  2,400 in / 68 out  $0.5000  stop",
        "├─ chat m                  500 ms  1,200 in / 34 out  $0.2500  retries: 2",
        "├─ execute_tool task       500 ms  1,200 in / 34 out",
        "│  └─ invoke_agent sub     500 ms  1,200 in / 34 out",
        "│     └─ chat m            500 ms  ~1,200 in / 34 out  waited 1.50 s",
        "└─ execute_tool x       1 min 1 s  ValueError: no ?[31mluck " + "y" * 147 + "…",
    ]
    assert repr(trace) == "<Trace t1: lead, 6 spans, 2.00 s, ok>"


def test_a_tree_without_a_root_shows_what_there_is(tmp_path: Path) -> None:
    exporter = file_trace_exporter(tmp_path)
    for span in (span_of("root", "t1"), child := span_of("one", "c", "t1"), other := span_of("two", "d", "t1", at=NOON + 1)):
        exporter.on_span_start(span)
    end(exporter, child)
    end(exporter, other)
    assert [line.split()[0] for line in str(read_trace("t1", tmp_path)).splitlines()[1:]] == ["one", "two"]
