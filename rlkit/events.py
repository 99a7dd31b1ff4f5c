"""TensorBoard event files."""

from __future__ import annotations

import io
import itertools
import math
import os
import platform
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlkit.files import append, make_folder

EVENT_FILE = "events.out.tfevents"
HISTOGRAM_BINS = 30
PART = 16_384  # values that go into a histogram at once, so that a core's cache holds what lies between

# The health page: title of a chart -> regular expressions, each matched against a whole tag. Three charts make a row.
HEALTH: dict[str, tuple[str, ...]] = {
    "return: evaluations": (r"^eval/return$",),
    "return: training, and its moving average": (r"^episode/return(_recent)?$",),
    "entropy": (r"^entropy/mean$",),
    "ratio": (r"^ratio/(mean|min|max)$",),
    "ratio: deviation, share clipped": (r"^ratio/(std|clipped)$",),
    "advantage": (r"^advantage/(mean|std)$",),
    "KL": (r"^kl/(old|ref)$",),
    "KL: in epochs 0, 1, 2, 4, 8, 16": (r"^kl/epoch_(0|1|2|4|8|16)$",),  # twenty lines cannot be told apart
    "gradient norm": (r"^grad_norm/(before|after)$",),
    "groups: share degenerate": (r"^group/degenerate$",),
    "value: error": (r"^value/error$",),
    "value: explained variance": (r"^value/explained_variance$",),
    "schedules": (r"^schedule/(?!learning_rate$).*$",),
    "schedules: learning rate": (r"^schedule/learning_rate$",),
    "stabilisers: coefficients": (r"^(?!schedule/|loss/).+/\w*coef$",),  # what links report
    "stabilisers: replay": (r"^replay/(ess|share)$",),
    "steps of an update, those not finite": (r"^update/(steps|nonfinite)$",),
    "speed: of all members together": (r"^speed/steps_per_second$",),
}

_serial = itertools.count()  # keeps the names of event files apart


class Board:
    """TensorBoard event files, one in each folder written to. Making one loads TensorBoard.

    A log entry is one event with many values: one call for each value would cost ten times as much. A file is
    appended and closed again, so any number of members needs no thread and no open file.

    Args:
        starts: of a run that is resumed, folder -> the first step that is not yet in its files: a TensorBoard that is
            open forgets what it has read of later ones.
    """

    def __init__(self, starts: Mapping[Path, int] | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._Event, self._Summary, self._RecordWriter = Event, Summary, RecordWriter
        self._restart = SessionLog(status=SessionLog.START)
        self._starts = dict(starts or {})
        self._paths: dict[Path, Path] = {}  # folder -> its event file

    def write(
        self,
        folder: Path,
        step: int,
        scalars: Iterable[tuple[str, float]],
        histograms: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Write scalars that are not nan and histograms (of finite values) that are not empty: one event."""
        summary = self._Summary()
        for name, value in scalars:
            if not math.isnan(value):
                summary.value.add(tag=name, simple_value=value)
        for name, values in (histograms or {}).items():
            if values.size:
                summary.value.add(tag=name, histo=histogram(values))
        if summary.value:
            self._append(folder, step, summary)

    def write_text(self, folder: Path, step: int, text: str, when: float | None = None) -> None:
        """Write a line of the text `events`; `when` is its time, if that is not now."""
        from tensorboard.plugins.text import metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        about = metadata.create_summary_metadata(display_name="events", description="")
        summary = self._Summary()
        summary.value.add(tag="events", metadata=about, tensor=make_tensor_proto(text.encode()))
        self._append(folder, step, summary, when)

    def write_layout(self, folder: Path, step: int, titles: Iterable[str]) -> None:
        """Write the health page of the CUSTOM SCALARS tab with these charts; the page written last is shown."""
        from tensorboard.plugins.custom_scalar import layout_pb2, metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        charts = [
            layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=HEALTH[title]))
            for title in titles
        ]
        layout = layout_pb2.Layout(category=[layout_pb2.Category(title="health", chart=charts)])
        summary = self._Summary()
        summary.value.add(
            tag=metadata.CONFIG_SUMMARY_TAG,
            metadata=metadata.create_summary_metadata(),
            tensor=make_tensor_proto(layout.SerializeToString()),
        )
        self._append(folder, step, summary)

    def write_hparams(
        self,
        folder: Path,
        step: int,
        hparams: Mapping[str, str | int | float | bool],
        metrics: Mapping[str, float],
    ) -> None:
        """Write a session of the HPARAMS tab: a folder with hyperparameters, metrics and nothing else.

        No description of the experiment is written: TensorBoard takes the first it finds and hides every
        hyperparameter not named there; without one it shows those of all runs. It then takes every scalar in
        the session's folder for a metric, hence a folder of its own. (In the run's root the values would be
        missing when TensorBoard is pointed at that run alone: the session is then ".", but its metrics are
        looked for in "./.".)
        """
        from tensorboard.plugins.hparams import api_pb2, metadata
        from tensorboard.plugins.hparams import plugin_data_pb2 as plugin

        start = plugin.SessionStartInfo(start_time_secs=time.time())
        for name, value in hparams.items():
            if isinstance(value, bool):  # before numbers: a bool is an int
                start.hparams[name].bool_value = value
            elif isinstance(value, (int, float)) and math.isfinite(value):
                start.hparams[name].number_value = value
            else:
                start.hparams[name].string_value = str(value)
        end = plugin.SessionEndInfo(status=api_pb2.STATUS_SUCCESS, end_time_secs=time.time())
        summary = self._Summary()
        for tag, data in (
            (metadata.SESSION_START_INFO_TAG, plugin.HParamsPluginData(session_start_info=start)),
            (metadata.SESSION_END_INFO_TAG, plugin.HParamsPluginData(session_end_info=end)),
        ):
            about = metadata.create_summary_metadata(data)
            summary.value.add(tag=tag, metadata=about, tensor=metadata.NULL_TENSOR)
        self._append(folder, step, summary)
        self.write(folder, step, metrics.items())

    def _append(self, folder: Path, step: int, summary: Any, when: float | None = None) -> None:
        now = time.time() if when is None else when
        events = [self._Event(wall_time=now, step=step, summary=summary)]
        if folder not in self._paths:
            make_folder(folder)
            self._paths[folder] = folder / _new_name(folder)
            if folder in self._starts:
                events.insert(0, self._Event(wall_time=now, step=self._starts[folder], session_log=self._restart))
            events.insert(0, self._Event(wall_time=now, file_version="brain.Event:2"))
        records = io.BytesIO()
        for event in events:
            self._RecordWriter(records).write(event.SerializeToString())
        append(self._paths[folder], records.getvalue())


def _new_name(folder: Path) -> str:
    """A name for an event file after those of the folder: TensorBoard reads them in the order of their names."""
    found = (re.match(rf"{EVENT_FILE}\.(\d+)\.", path.name) for path in folder.glob(f"{EVENT_FILE}.*"))
    moment = max([round(time.time()), *(int(match[1]) + 1 for match in found if match)])
    return f"{EVENT_FILE}.{moment}.{platform.node()}.{os.getpid()}.{next(_serial)}"


def charts(tags: Iterable[str]) -> list[str]:
    """Titles of the charts of the health page that have something to show of scalars with these tags."""
    tags = list(tags)
    return [title for title, patterns in HEALTH.items() if any(re.match(p, tag) for p in patterns for tag in tags)]


def histogram(values: np.ndarray) -> dict[str, Any]:
    """Return the fields of TensorBoard's HistogramProto: 30 bins of equal width between the extreme values.

    Args:
        values: float32 [n], n >= 1.
    """
    low, high = float(values.min()), float(values.max())
    width = (high - low) / HISTOGRAM_BINS
    total = squares = 0.0
    counts = np.zeros(HISTOGRAM_BINS, np.int64)
    for k in range(0, values.size, PART):
        part = values[k : k + PART].astype(np.float64)
        total, squares = total + float(part.sum()), squares + float(part @ part)
        # np.histogram refuses values that differ by a few units in the last place, as the first ratios do
        part -= low
        part /= width or 1.0
        counts += np.bincount(np.minimum(part.astype(np.int64), HISTOGRAM_BINS - 1), minlength=HISTOGRAM_BINS)
    inner = (low + width * np.arange(1, HISTOGRAM_BINS)).tolist()
    return {
        "min": low,
        "max": high,
        "num": values.size,
        "sum": total,
        "sum_squares": squares,
        "bucket_limit": [*inner, high] if width else [high],
        "bucket": counts.tolist() if width else [values.size],
    }
