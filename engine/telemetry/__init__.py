"""A run's output: errors, log lines, progress, metrics. Imports torch only for TensorBoard, and only when asked."""

from engine.telemetry.errors import run_command
from engine.telemetry.format import format_bytes, format_columns, format_count, format_duration
from engine.telemetry.log import Log
from engine.telemetry.metrics import MetricsWriter
from engine.telemetry.process_memory import peak_memory_bytes
from engine.telemetry.progress import Progress, ProgressLine, TrainProgress

__all__ = [
    "Log",
    "MetricsWriter",
    "Progress",
    "ProgressLine",
    "TrainProgress",
    "format_bytes",
    "format_columns",
    "format_count",
    "format_duration",
    "peak_memory_bytes",
    "run_command",
]
