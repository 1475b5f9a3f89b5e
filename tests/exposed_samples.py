"""What `/metrics` says, read by Prometheus' own parser for Python."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


class Samples:
    """The samples of a text in Prometheus' format."""

    def __init__(self, text: str) -> None:
        self._values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    @classmethod
    def of(cls, figures: Collector) -> "Samples":
        """The samples of figures as they are now."""
        registry = CollectorRegistry()
        registry.register(figures)
        return cls(generate_latest(registry).decode())

    def __call__(self, name: str, **labels: str) -> float:
        """The value of one sample."""
        return self._values[name, frozenset(labels.items())]

    def total(self, name: str) -> float:
        """The sum of a figure's values over all labels."""
        values = [value for (of, _), value in self._values.items() if of == name]
        assert values, f"no sample of {name}"
        return sum(values)

    def by(self, name: str, label: str) -> dict[str, float]:
        """The values of a figure that are not 0, by a label."""
        found = {dict(key)[label]: value for (of, key), value in self._values.items() if of == name}
        return {key: value for key, value in found.items() if value}

    @property
    def names(self) -> set[str]:
        """The names of all samples."""
        return {name for name, _ in self._values}
