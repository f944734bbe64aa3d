"""Records of runs, tables with spread, general figures, and the report page.

The names below are imported when they are first used, so that a prediction draws no figures.
"""

from typing import Any

from peerbayes.lazy import lazy

__all__ = ["Record", "differences", "evaluate", "predict_inputs", "sizes", "text_table", "write_report"]

_get, __dir__ = lazy(
    __name__,
    {
        "Record": "reports.scoring",
        "differences": "reports.tables",
        "evaluate": "reports.evaluating",
        "predict_inputs": "reports.predictions",
        "sizes": "reports.file_sizes",
        "text_table": "reports.tables",
        "write_report": "reports.page",
    },
)


def __getattr__(name: str) -> Any:
    return _get(name)
