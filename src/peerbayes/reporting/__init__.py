"""Reporting: records, tables with spread, figures and the report page."""

from peerbayes.reporting.curves import write_figure
from peerbayes.reporting.pipeline import pipeline_table
from peerbayes.reporting.predicting import predict_inputs, prediction_table
from peerbayes.reporting.records import Record, evaluate, find_runs, write_record
from peerbayes.reporting.report import report_page, write_report
from peerbayes.reporting.sizes import size_table, sizes
from peerbayes.reporting.swept import sweep_table, write_sweep_figure
from peerbayes.reporting.tables import differences, rows, text_table

__all__ = [
    "Record",
    "differences",
    "evaluate",
    "find_runs",
    "pipeline_table",
    "predict_inputs",
    "prediction_table",
    "report_page",
    "rows",
    "size_table",
    "sizes",
    "sweep_table",
    "text_table",
    "write_figure",
    "write_record",
    "write_report",
    "write_sweep_figure",
]
