"""Results that are too long for the model, kept whole and read in parts."""

from __future__ import annotations

import asyncio
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.create import create_agent
from lousho_ray.errors import CompactedLLMProviderError, ConfigurationError
from lousho_ray.ports import ToolContext
from lousho_ray.stores.files import file_store
from lousho_ray.stores.memory import memory_store
from lousho_ray.stores.sqlite import SqliteStore
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tools.execute import call_tool
from lousho_ray.tools.spill import KeptResults, SpillArea, read_result_tool
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
    kept = KeptResults("s", area=SpillArea())
    handle = kept.keep(LONG)
    tool = read_result_tool(400, kept)
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
    area, store = SpillArea(), memory_store().checkpoints
    kept = KeptResults("a", store, area)
    handle = kept.keep(LONG)
    await kept.save()
    assert await KeptResults("a", store, SpillArea()).read(handle) == LONG
    for session_id in ("b", None):
        tool = read_result_tool(400, KeptResults(session_id, store, area))
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
    assert read_result_tool(400, KeptResults(None)).read_only
    with pytest.raises(ConfigurationError, match="read_result"):
        agent_of("never", tools=[plain("read_result")], spill_tool_results=True)
    with pytest.raises(ConfigurationError, match="read_result"):
        await agent_of("never", tools=lambda who: [plain("read_result")], spill_tool_results=True).send("Go")
    with pytest.raises(ConfigurationError) as caught:
        agent_of("never", spill_tool_results="yes")
    assert caught.value.field == "spill_tool_results"


# ------------------------------------------------------------------------------------------------------------- in another process


OTHER_PROCESS = """
    import asyncio, sys
    from lousho_ray import create_agent, SqliteStore
    from lousho_ray.testing.mock_model import mock_model
    from tests.unit.test_tool_spill import read_next

    async def main(path, way):
        async with SqliteStore(path) as store:
            agent = create_agent(
                provider=mock_model([read_next(), "Done"]), max_tool_result_chars=400, spill_tool_results=True, store=store
            )
            match way:
                case "turn": result = await agent.session("s").send("Read on")
                case "resume": result = await agent.session("s").resume()
                case "run": result = await agent.resume("r")
            print([message.text for message in result.messages if message.tool_name == "read_result"][-1], end="")

    asyncio.run(main(*sys.argv[1:]))
"""


async def in_another_process(path: Path, way: str) -> str:
    """What `read_result` gives a model that asks in a process of its own."""
    code = textwrap.dedent(OTHER_PROCESS)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(path), way, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


@pytest.mark.parametrize("way", ["turn", "resume", "run"])
async def test_another_process_reads_what_a_durable_run_kept(way: str, tmp_path: Path) -> None:
    # LES-20: after the turn, and where the turn (or the run) was interrupted behind the result
    path = tmp_path / "s.db"
    turns = [calls("look"), "One"] if way == "turn" else [calls("look"), RuntimeError("down")]
    async with SqliteStore(path) as store:
        agent = spilling(*turns, store=store)
        if way == "turn":
            await agent.session("s").send("Look")
        else:
            with pytest.raises(CompactedLLMProviderError):
                await (agent.session("s").send("Look") if way == "resume" else agent.send("Look", session_id="r"))
    assert (await in_another_process(path, way)).startswith('"' + LONG[240:250].replace("\n", "\\n"))


@pytest.mark.parametrize("kind", ["memory", "file", "sqlite"])
async def test_results_end_with_their_session_and_are_in_the_store_before_what_names_them(kind: str, tmp_path: Path) -> None:
    # LES-20
    kinds_of_store: dict[str, Any] = {
        "memory": memory_store,
        "file": lambda: file_store(tmp_path),
        "sqlite": lambda: SqliteStore(tmp_path / "s.db"),
    }
    store: Any = kinds_of_store[kind]()

    async def stored(handle: str) -> str | None:
        return await KeptResults("s", store.checkpoints, SpillArea()).read(handle)

    async with store:
        seen: list[str | None] = []
        save = store.checkpoints.save

        async def watched(record: Any) -> None:
            await save(record)
            if ".turn-" in record["sessionId"]:
                handles = re.findall(r"res_[0-9a-f]{32}", str(await store.checkpoints.load(record["sessionId"])))
                seen.extend([await stored(handle) for handle in handles])

        store.checkpoints.save = watched
        session = spilling(calls("look", "look"), "One", store=store).session("s")
        result = await session.send("Look")
        assert seen
        assert set(seen) == {LONG}
        handles = re.findall(r"res_[0-9a-f]{32}", str(results(result.messages)))
        await session.clear()
        assert [await stored(handle) for handle in handles] == [None, None]


async def test_a_run_whose_result_cannot_be_stored_fails() -> None:
    # LES-20: like one whose checkpoint cannot be
    store: Any = memory_store()
    save = store.checkpoints.save

    async def full(record: Any) -> None:
        if ".result-" in record["sessionId"]:
            raise OSError("full")
        await save(record)

    store.checkpoints.save = full
    with pytest.raises(OSError, match="full"):
        await spilling(calls("look"), "Never", store=store).session("s").send("Look")


async def test_a_long_name_and_a_made_up_handle() -> None:
    # LES-20
    name, store = "n" * 128, memory_store().checkpoints
    kept = KeptResults(name, store, SpillArea())
    handle = kept.keep(LONG)
    await kept.save()
    other = KeptResults(name, store, SpillArea())
    assert await other.read(handle) == LONG
    assert [await other.read(made_up) for made_up in ("", "res_1", "../../etc", "res_" + "0" * 32)] == [None] * 4
