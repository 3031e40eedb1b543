"""The `lousho` command."""

from lousho_ray.cli.app import main, run_lousho

__all__ = ["main", "run_lousho"]
