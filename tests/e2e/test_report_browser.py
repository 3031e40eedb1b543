"""The HTML report in a browser: what a person sees and clicks, and what a hostile reply cannot do there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.evals.context import Assertion
from lousho_ray.evals.records import CaseRecord, Status
from lousho_ray.evals.reports import REPORTS
from lousho_ray.evals.summary import summarize

pytestmark = pytest.mark.slow

HOSTILE = "</script><script>document.title = 'ran'</script><img src=x onerror=\"document.title = 'ran'\"> <b>*plain*</b>"
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The key of an element's id in W3C WebDriver."""
TIMEOUT_S = 60.0


class Browser:
    """Chromium without a window, over the HTTP interface of chromedriver."""

    def __init__(self, driver: str, browser: str, profile: Path) -> None:
        self._process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._session = ""
        try:
            self._session = f"http://127.0.0.1:{self._port()}/session"
            args = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--user-data-dir={profile}"]
            options = {"browserName": "chrome", "goog:chromeOptions": {"binary": browser, "args": args}}
            self._session += f"/{self.ask('POST', '', {'capabilities': {'alwaysMatch': options}})['sessionId']}"
        except BaseException:
            self._stop()
            raise

    def _port(self) -> str:
        said = []
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said.append(line)
            if found := re.search(r"started successfully on port (\d+)", line):
                return found[1]
        raise AssertionError(f"chromedriver did not start: {''.join(said)}")

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._session}{path}", data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)["value"]

    def open(self, page: Path) -> None:
        self.ask("POST", "/url", {"url": page.as_uri()})

    def all(self, css: str) -> list[str]:
        return [found[ELEMENT] for found in self.ask("POST", "/elements", {"using": "css selector", "value": css})]

    def texts(self, css: str) -> list[str]:
        return [self.ask("GET", f"/element/{one}/text") for one in self.all(css)]

    def click(self, css: str) -> None:
        self.ask("POST", f"/element/{self.all(css)[0]}/click", {})

    def type(self, css: str, text: str) -> None:
        self.ask("POST", f"/element/{self.all(css)[0]}/value", {"text": text})

    @property
    def title(self) -> str:
        return str(self.ask("GET", "/title"))

    def close(self) -> None:
        try:
            self.ask("DELETE", "")
        finally:
            self._stop()

    def _stop(self) -> None:
        self._process.terminate()
        self._process.communicate()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    driver, program = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
    if driver is None or program is None:
        pytest.fail("This test needs Chromium and chromedriver: apt-get install -y chromium chromium-driver")
    made = Browser(driver, program, tmp_path / "profile")
    yield made
    made.close()


def case(name: str, status: Status, reply: str) -> CaseRecord:
    gate = Assertion("polite", "gate", status == "passed", 1.0, message="" if status == "passed" else f"said {reply}")
    transcript = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": [{"type": "text", "text": reply}]})
    return CaseRecord(
        name, "greets", name, 0, "some.eval.py", status, (gate,), reply=reply, duration_ms=5.0, tags=(name,), transcript=transcript
    )


def test_a_report_is_filtered_and_a_failing_case_opened_and_what_a_model_wrote_is_text(browser: Browser, tmp_path: Path) -> None:
    control = tmp_path / "control.html"
    control.write_text(f"<title>Evals</title><script>0;{HOSTILE}", "utf-8")
    browser.open(control)
    assert browser.title == "ran"  # as HTML the text would run

    page = tmp_path / "report.html"
    cases = [case("fine", "passed", "Good day."), case("rude", "failed", "Go away."), case(f"odd {HOSTILE}", "failed", HOSTILE)]
    page.write_text(REPORTS["html"](summarize(cases, {})), "utf-8")
    browser.open(page)
    assert browser.texts("details .name") == [f"greets[odd {HOSTILE}]", "greets[rude]"]  # at first, those that did not pass
    browser.click("select option:first-child")
    assert len(browser.all("details")) == 3

    browser.type("input", "ODD <")
    assert browser.texts("details .name") == [f"greets[odd {HOSTILE}]"]
    assert browser.texts("details pre") == []
    browser.click("summary")
    assert browser.texts("details pre") == ["Hello", HOSTILE]
    assert browser.texts("details div.failed") == [f"failed gate polite 1: said {HOSTILE}"]

    assert (browser.title, browser.all("img"), browser.all("b"), len(browser.all("script"))) == ("Evals", [], [], 2)
