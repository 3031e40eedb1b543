"""Tools for testing agents without a network or a key: a scripted model, a clock that stands still, a fake server."""

from lousho_ray.testing.clock import FakeClock
from lousho_ray.testing.mock_model import MockModel, MockTurn, mock_model

__all__ = ["FakeClock", "MockModel", "MockTurn", "mock_model"]
