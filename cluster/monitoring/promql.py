"""PromQL over defined metrics. Every number is scraped once, so sums need not tell targets apart."""

import re

from cluster.monitoring.metric import Kind, Metric


def increase(metric: Metric, window: str, by: str = "", **matchers: str) -> str:
    """What a counter grew by, summed."""
    return _sum(f"increase({_selector(metric, **matchers)}[{window}])", by)


def rate(metric: Metric, window: str, by: str = "", **matchers: str) -> str:
    """What a counter grows by in a second, summed."""
    assert metric.kind is Kind.COUNTER, metric.name
    return _sum(f"rate({_selector(metric, **matchers)}[{window}])", by)


def current(metric: Metric, by: str = "", **matchers: str) -> str:
    """What a gauge is, summed."""
    assert metric.kind is Kind.GAUGE, metric.name
    return _sum(_selector(metric, **matchers), by)


def highest(metric: Metric, by: str = "") -> str:
    """The highest value of a gauge."""
    assert metric.kind is Kind.GAUGE, metric.name
    return f"max{_by(by)}({metric.series})"


def quantile(metric: Metric, share: float, window: str) -> str:
    """Below what ``share`` of a histogram's observations were."""
    assert metric.kind is Kind.HISTOGRAM, metric.name
    return f"histogram_quantile({share:g}, sum by (le) (rate({metric.series}_bucket[{window}])))"


def mean(metric: Metric, window: str) -> str:
    """The mean of a histogram's observations."""
    assert metric.kind is Kind.HISTOGRAM, metric.name
    return f"sum(rate({metric.series}_sum[{window}])) / sum(rate({metric.series}_count[{window}]))"


def seen_by_any(metric: Metric, window: str, by: str) -> str:
    """What a counter of one and the same thing grew by, where every front end counts it."""
    return f"max{_by(by)}(increase({metric.series}[{window}]))"


def _selector(metric: Metric, **matchers: str) -> str:
    """``status="5.."`` matches a regular expression; labels that the metric lacks are a mistake of ours."""
    for name, value in matchers.items():
        label = next(label for label in metric.labels if label.name == name)
        assert not label.values or any(_matches(value, each) for each in label.values), (metric.name, value)
    chosen = ",".join(f'{name}=~"{value}"' for name, value in matchers.items())
    return f"{metric.series}{{{chosen}}}" if chosen else metric.series


def _matches(pattern: str, value: str) -> bool:
    return re.fullmatch(pattern, value) is not None


def _sum(expression: str, by: str) -> str:
    return f"sum{_by(by)}({expression})"


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""
