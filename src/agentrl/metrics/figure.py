"""What a figure is: name, help and labels, declared once. Its values make a family of samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

Values = Mapping[Any, float]
"""Values by their label, a text; by a tuple of texts, if a figure has several labels."""


@dataclass(frozen=True, slots=True)
class Gauge:
    """A value that goes up and down. `labels`: names of what its values are told apart by."""

    name: str
    help: str
    labels: tuple[str, ...] = ()

    def of(self, value: float | None) -> Metric:
        """The figure with one value; without any, if it is None."""
        return self.by({} if value is None else {(): value})

    def by(self, values: Values) -> Metric:
        """The figure with a value for each label."""
        return _filled(GaugeMetricFamily(self.name, self.help, labels=self.labels), values)


@dataclass(frozen=True, slots=True)
class Counter:
    """A sum that only grows while its process lives. `name`: as in queries, with `_total`."""

    name: str
    help: str
    labels: tuple[str, ...] = ()

    def of(self, value: float) -> Metric:
        """The figure with one value."""
        return self.by({(): value})

    def by(self, values: Values) -> Metric:
        """The figure with a value for each label."""
        return _filled(CounterMetricFamily(self.name, self.help, labels=self.labels), values)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values by size. `bounds`: the largest value of each bucket but the last."""

    name: str
    help: str
    bounds: tuple[float, ...]

    def of(self, counts: Sequence[float], total: float) -> Metric:
        """The figure with the count of each bucket, and the sum of all values."""
        ends = [floatToGoString(bound) for bound in (*self.bounds, inf)]
        so_far, buckets = 0.0, []
        for end, count in zip(ends, counts, strict=True):
            so_far += count
            buckets.append((end, so_far))
        return HistogramMetricFamily(self.name, self.help, buckets=buckets, sum_value=total)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    for label, value in values.items():
        family.add_metric([label] if isinstance(label, str) else list(label), value)
    return family
