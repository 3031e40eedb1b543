"""Reports of a suite's summary."""

from lousho_ray.evals.reports.diff import RunDiff, diff_runs, print_diff
from lousho_ray.evals.reports.files import REPORTS, check_writable, write_report
from lousho_ray.evals.reports.table import print_summary

__all__ = ["REPORTS", "RunDiff", "check_writable", "diff_runs", "print_diff", "print_summary", "write_report"]
