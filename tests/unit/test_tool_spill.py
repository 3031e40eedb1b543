"""Results that are too long for the model, kept whole and read in parts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lousho_ray.create import create_agent
from lousho_ray.errors import ConfigurationError
from lousho_ray.ports import ToolContext
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tools.execute import call_tool
from lousho_ray.tools.spill import SpillArea, read_result_tool
from tests.unit.loop_support import agent_of, calls, kinds, plain, results

LONG = "".join(f"line {number}\n" for number in range(200))


def read_next(position: str = "") -> Any:
    """A model's turn: reads the result whose handle the last cut result named, from where it said or at `position`."""

    def turn(request: Any) -> Any:
        text = next(message.text for message in reversed(request.messages) if "read_result(handle=" in message.text)
        handle, offset = re.search(r"read_result\(handle='(\w+)', offset=(\d+)\)", text).groups()  # type: ignore[union-attr]
        return calls(("read_result", {"handle": handle, "offset": int(position or offset)}))

    return turn


def spilling(*turns: Any, chars: int = 400, result: Any = LONG, **options: Any) -> Any:
    return create_agent(
        provider=mock_model([*turns]),
        tools=[plain("look", result)],
        max_tool_result_chars=chars,
        spill_tool_results=True,
        **options,
    )


async def test_a_cut_result_names_a_handle_by_which_its_rest_is_read() -> None:
    # LES-20
    result = await spilling(calls("look"), read_next(), "Done").send("Go")
    cut, rest = results(result.messages)
    assert cut.startswith(LONG[:240] + "\n\n[... ")
    assert len(cut) < 400 + 300
    assert rest.startswith(LONG[240:400])
    assert rest.endswith(f"\n[characters 240 to 520 of {len(LONG)}; go on with offset=520]")
    assert "left out" not in rest


async def test_all_of_a_result_can_be_read_piece_by_piece() -> None:
    # LES-20
    area = SpillArea()
    handle = area.keep(LONG, "s")
    tool = read_result_tool(400, area)
    got, offset = "", 0
    while offset < len(LONG):
        piece: str = await call_tool(
            tool, tool.parse(f'{{"handle": "{handle}", "offset": {offset}}}').value, ToolContext("c", session_id="s")
        )
        assert len(piece) <= 400
        text, _, position = piece.rpartition("\n[characters ")
        got += text
        offset = int(position.split(" ")[2])
    assert got == LONG


async def test_a_structured_result_is_kept_as_its_json() -> None:
    # LES-20
    result = await spilling(calls("look"), read_next("0"), "Done", result={"rows": list(range(1_000))}).send("Go")
    assert results(result.messages)[1].startswith('{"rows":[0,1,2,3')


async def test_a_part_is_never_cut_itself_however_small_the_cap_is() -> None:
    # LES-20
    result = await spilling(calls("look"), read_next("0"), "Done", chars=30).send("Go")
    assert results(result.messages)[1] == f"l\n[characters 0 to 1 of {len(LONG)}; go on with offset=1]"


async def test_a_short_result_is_neither_cut_nor_kept() -> None:
    # LES-20
    result = await spilling(calls("look"), "Done", result="short").send("Go")
    assert results(result.messages) == ["short"]


async def test_a_handle_lasts_for_the_turns_of_its_session_and_no_other_session_reads_it() -> None:
    # LES-20
    agent = spilling(calls("look"), "One", read_next(), "Two", calls(("read_result", {"handle": "HANDLE"})), "Three")
    session = agent.session("a")
    await session.send("Look")
    assert kinds((await session.send("Read on")).messages) == ["ok", "ok"]
    area = SpillArea()
    handle = area.keep(LONG, "a")
    tool = read_result_tool(400, area)
    for session_id in ("b", None):
        with pytest.raises(Exception, match="any more"):
            await call_tool(tool, tool.parse(f'{{"handle": "{handle}"}}').value, ToolContext("c", session_id=session_id))


async def test_a_handle_that_is_gone_is_an_error_that_says_what_to_do() -> None:
    # LES-20
    result = await spilling(calls(("read_result", {"handle": "res_none"})), "Done").send("Go")
    assert kinds(result.messages) == ["execution"]
    assert "Call the tool again" in results(result.messages)[0]["message"]


def test_the_oldest_results_make_room() -> None:
    area = SpillArea(max_chars=10)
    first, second, third = area.keep("a" * 6, None), area.keep("b" * 4, None), area.keep("c" * 4, None)
    assert [area.read(handle, None) for handle in (first, second, third)] == [None, "bbbb", "cccc"]
    assert area.read(area.keep("d" * 11, None), None) is None


async def test_without_the_option_there_is_no_handle_and_no_tool() -> None:
    # LES-20
    model = mock_model([calls("look"), "Done"])
    result = await create_agent(provider=model, tools=[plain("look", LONG)], max_tool_result_chars=400).send("Go")
    assert "read_result" not in str(results(result.messages))
    assert [tool.name for tool in model.calls[0].tools] == ["look"]


async def test_the_tool_is_read_only_and_its_name_is_taken() -> None:
    # LES-20, TOOL-10, CA-21
    assert read_result_tool(400).read_only
    with pytest.raises(ConfigurationError, match="read_result"):
        agent_of("never", tools=[plain("read_result")], spill_tool_results=True)
    with pytest.raises(ConfigurationError, match="read_result"):
        await agent_of("never", tools=lambda who: [plain("read_result")], spill_tool_results=True).send("Go")
    with pytest.raises(ConfigurationError) as caught:
        agent_of("never", spill_tool_results="yes")
    assert caught.value.field == "spill_tool_results"
