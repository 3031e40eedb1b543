"""How Responses input items belong together: calls with outputs, reasoning with the item it led to, ids with what is stored."""

from __future__ import annotations

from typing import Any

from lousho_ray.testing.fake_server.rule import Checked, broken, need

_ID_PREFIXES = {"function_call": "fc_", "message": "msg_", "reasoning": "rs_"}


def check_calls(checked: Checked) -> None:
    """Every function call has exactly one output after it, and no output is without a call."""
    asked: set[str] = set(checked.issued.responses.get(_previous(checked), ()))
    answered: set[str] = set()
    for index, item in enumerate(_items(checked)):
        where = f"input.{index}"
        if item.get("type") == "function_call":
            need(item["call_id"] not in asked, "call-id-unique", f"Duplicate function call {item['call_id']!r} at '{where}'")
            asked.add(item["call_id"])
        elif item.get("type") == "function_call_output":
            call_id = item["call_id"]
            need(
                call_id in asked,
                "orphan-result",
                f"No tool call found for the output with call_id {call_id} at '{where}'",
            )
            need(call_id not in answered, "call-answered-twice", f"Function call {call_id} has been answered already at '{where}'")
            answered.add(call_id)
    missing = sorted(asked - answered)
    need(not missing, "call-unanswered", f"No tool output found for function call {', '.join(missing)}")


def check_reasoning(checked: Checked) -> None:
    """A reasoning item is followed directly by what it led to; unstored ones carry the server's own encrypted content."""
    items = _items(checked)
    for index, item in enumerate(items):
        if item.get("type") != "reasoning":
            continue
        following = items[index + 1] if index + 1 < len(items) else {}
        kind = following.get("type", "message")
        led_to = following and (following.get("role") == "assistant" if kind == "message" else not kind.endswith("_output"))
        need(led_to, "reasoning-alone", f"Item '{item['id']}' of type 'reasoning' was provided without its required following item")
        encrypted = item.get("encrypted_content")
        if encrypted is not None:
            known = encrypted in checked.issued.encrypted
            need(known, "reasoning-encrypted", f"The encrypted content of item '{item['id']}' could not be verified")
        elif _stateless(checked):
            broken("item-not-found", f"Item with id '{item['id']}' not found: items are not persisted when 'store' is false")
        else:
            need(item["id"] in checked.issued.items, "item-not-found", f"Item with id '{item['id']}' not found")


def check_item_ids(checked: Checked) -> None:
    """An item with an id is there together with its reasoning item; without `store` only beside encrypted reasoning."""
    need(not (_previous(checked) and _stateless(checked)), "previous-response", "Previous response not found: 'store' is false")
    known = _previous(checked) in ("", *checked.issued.responses)
    need(known, "previous-response", f"Previous response with id '{_previous(checked)}' not found")
    items = _items(checked)
    for index, item in enumerate(items):
        item_id = item.get("id")
        kind = item.get("type", "message")
        if kind == "item_reference":
            found = not _stateless(checked) and item_id in checked.issued.items
            need(found, "item-not-found", f"Item with id '{item_id}' not found: items are persisted only when 'store' is true")
        if item_id is None or kind not in _ID_PREFIXES:
            continue
        prefix = _ID_PREFIXES[kind]
        right = str(item_id).startswith(prefix)
        need(right, "item-id", f"Invalid 'input.{index}.id': '{item_id}'; expected an ID that begins with '{prefix}'")
        if kind != "reasoning":
            _check_belonging(checked, items, index, str(item_id))


def _check_belonging(checked: Checked, items: list[dict[str, Any]], index: int, item_id: str) -> None:
    before = _reasoning_before(items, index)
    needed = checked.issued.items.get(item_id)
    together = needed is None or (before is not None and before.get("id") == needed)
    need(together, "reasoning-missing", f"Item '{item_id}' was provided without its required 'reasoning' item: '{needed}'")
    if _stateless(checked):
        beside = before is not None and before.get("encrypted_content") is not None
        need(
            beside,
            "item-not-found",
            f"Item with id '{item_id}' not found: items are not persisted when 'store' is false",
        )
    else:
        need(item_id in checked.issued.items, "item-not-found", f"Item with id '{item_id}' not found")


def _reasoning_before(items: list[dict[str, Any]], index: int) -> dict[str, Any] | None:
    """The reasoning item of the same model turn."""
    for item in items[:index][::-1]:
        kind = str(item.get("type", "message"))
        if kind in ("reasoning", "item_reference"):
            return item
        if kind.endswith("_output") or (kind == "message" and item.get("role") != "assistant"):
            return None
    return None


def _items(checked: Checked) -> list[dict[str, Any]]:
    value: Any = checked.body.get("input")
    return value if isinstance(value, list) else []


def _stateless(checked: Checked) -> bool:
    return checked.body.get("store") is False


def _previous(checked: Checked) -> str:
    return str(checked.body.get("previous_response_id", ""))
