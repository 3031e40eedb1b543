"""Tools for testing agents without a network or a key: a scripted model, recordings, a clock that stands still, a fake server."""

from lousho_ray.testing.cassettes import record_replay
from lousho_ray.testing.clock import FakeClock
from lousho_ray.testing.embedders import hash_embedder, record_replay_embedder
from lousho_ray.testing.mock_model import MockModel, MockTurn, mock_model
from lousho_ray.testing.runs import collect, make_tool_context
from lousho_ray.tools.workspace.provider import MemoryWorkspace

__all__ = [
    "FakeClock",
    "MemoryWorkspace",
    "MockModel",
    "MockTurn",
    "collect",
    "hash_embedder",
    "make_tool_context",
    "mock_model",
    "record_replay",
    "record_replay_embedder",
]
