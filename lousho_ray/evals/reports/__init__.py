"""Reports of a suite's summary."""

from lousho_ray.evals.reports.files import REPORTS, check_writable, write_report
from lousho_ray.evals.reports.table import print_summary

__all__ = ["REPORTS", "check_writable", "print_summary", "write_report"]
