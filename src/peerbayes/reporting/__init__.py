"""Reporting: records, tables with spread, figures and the report page."""

from peerbayes.reporting.records import Record, evaluate, find_runs, write_record
from peerbayes.reporting.report import report_page
from peerbayes.reporting.tables import differences, rows, text_table

__all__ = ["Record", "differences", "evaluate", "find_runs", "report_page", "rows", "text_table", "write_record"]
