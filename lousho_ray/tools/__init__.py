"""Tools: functions a model may call."""

from lousho_ray.tools.attributes import ToolAnnotations
from lousho_ray.tools.registry import ToolRegistry, collect_tools
from lousho_ray.tools.results import error_result as tool_error_result
from lousho_ray.tools.tool import Tool, define_tool, tool

__all__ = ["Tool", "ToolAnnotations", "ToolRegistry", "collect_tools", "define_tool", "tool", "tool_error_result"]
